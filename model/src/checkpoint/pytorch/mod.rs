//! A file of weights that `torch.save` has written, `pytorch_model.bin`: a zip archive of
//! storages, and a pickle that has the location of each tensor. Tensors are read in place, and
//! nothing in the pickle is executed.

mod archive;
mod pickle;

use std::collections::BTreeMap;
use std::ops::Range;

use self::pickle::{Node, Pickle, Value};
use super::error::CheckpointError;
use super::shard::{Content, Reading, Shard, StoredTensor, UnsupportedStorage};
use super::stored::{Stored, TensorType};

/// Size limit of a pickle, enough for about 50,000 tensors. Each byte of a pickle may create a
/// value of 32 bytes.
const PICKLE_BYTES_MAX: usize = 8 << 20;

/// Finds the tensors of a file.
///
/// # Errors
/// [`CheckpointError::Header`] for a damaged file; [`CheckpointError::Setting`] for a file that is
/// not a zip archive, such as a file of PyTorch before 1.6.
pub(super) fn shard(file: &str, content: Content) -> Result<Shard, CheckpointError> {
    if !content.bytes().starts_with(b"PK") {
        let (setting, value) = ("the format".to_owned(), "not a zip archive".to_owned());
        let supported = "the zip format that torch.save writes since PyTorch 1.6".to_owned();
        return Err(CheckpointError::Setting { file: file.to_owned(), setting, value, supported });
    }
    let (pickle, tensors) =
        tensors(content.bytes()).map_err(|reason| CheckpointError::Header { file: file.to_owned(), reason })?;
    Ok(Shard::new(file, content, pickle, tensors))
}

/// The byte range of the pickle, and the location of every tensor.
fn tensors(file: &[u8]) -> Result<(Range<usize>, BTreeMap<String, StoredTensor>), String> {
    const PICKLE: &str = "data.pkl";
    let entries = archive::entries(file)?;
    let named = entries.iter().find_map(|(name, range)| Some((name.strip_suffix(PICKLE)?, range)));
    let (folder, range) = named.ok_or("it has no data.pkl")?;
    if range.len() > PICKLE_BYTES_MAX {
        return Err(format!("its pickle has {} bytes; the limit is {PICKLE_BYTES_MAX}", range.len()));
    }
    if let Some(order) = entries.get(&*format!("{folder}byteorder"))
        && file[order.clone()] != *b"little"
    {
        return Err("its numbers are not little-endian".to_owned());
    }
    let state = State { pickle: Pickle::read(&file[range.clone()])?, folder, entries: &entries };
    let Value::Dict(pairs) = state.pickle.value(state.pickle.root) else {
        return Err("it holds no dictionary of tensors".to_owned());
    };
    let mut tensors = BTreeMap::new();
    for (name, value) in pairs {
        let name = state.pickle.text(*name).ok_or("the name of a tensor is not a string")?;
        tensors.insert(name.to_owned(), state.place(*value).map_err(|reason| format!("the tensor {name} {reason}"))?);
    }
    Ok((range.clone(), tensors))
}

/// A pickle, and the storages that it names.
struct State<'f> {
    pickle: Pickle<'f>,
    folder: &'f str,
    entries: &'f BTreeMap<&'f str, Range<usize>>,
}

impl State<'_> {
    fn place(&self, value: Node) -> Result<StoredTensor, String> {
        let arguments = self.arguments(value).ok_or("is not a tensor")?;
        let [storage, offset, shape, strides, ..] = *arguments else { return Err("is not a tensor".to_owned()) };
        let (dtype, storage) = self.storage(storage).ok_or("refers to a storage that the file lacks")?;
        // The number of axes is limited because shapes and strides are copied, and many tensors of
        // a file may refer to the same tuple.
        let axes = |tuple| self.pickle.numbers(tuple, AXES_MAX);
        let numbers = self.pickle.number(offset).zip(axes(shape)).zip(axes(strides));
        let ((offset, shape), strides) =
            numbers.ok_or_else(|| format!("has no shape, or a shape of more than {AXES_MAX} axes"))?;
        let elements = elements(&shape, &strides)?;
        let place = |stored, bytes| StoredTensor { stored, shape, bytes, reading: Reading::default() };
        let of_type = |dtype| (Stored::Plain(dtype), dtype);
        let size = match &dtype {
            Ok(dtype) => dtype.bytes(),
            Err(UnsupportedStorage::Type(name)) if name == I64 => 8,
            Err(_) => return Ok(place(dtype.map(of_type), storage.start..storage.start)),
        };
        let reach = |count: usize| count.checked_mul(size).and_then(|bytes| bytes.checked_add(storage.start));
        let (start, end) = (reach(offset), offset.checked_add(elements).and_then(reach));
        match start.zip(end).filter(|(_, end)| *end <= storage.end) {
            Some((start, end)) => Ok(place(dtype.map(of_type), start..end)),
            None => Err(format!("reaches beyond its storage of {} bytes", storage.len())),
        }
    }

    /// The arguments of the call that rebuilds a tensor in torch. The tensor may be
    /// wrapped in a parameter.
    fn arguments(&self, value: Node) -> Option<&[Node]> {
        let Value::Call(callable, arguments) = *self.pickle.value(value) else { return None };
        let arguments = self.pickle.tuple(arguments)?;
        match self.pickle.value(callable) {
            Value::Global("torch._utils", "_rebuild_tensor_v2") => Some(arguments),
            Value::Global("torch._utils", "_rebuild_parameter") => {
                let Value::Call(callable, inner) = *self.pickle.value(*arguments.first()?) else { return None };
                let is_tensor = *self.pickle.value(callable) == Value::Global("torch._utils", "_rebuild_tensor_v2");
                self.pickle.tuple(inner).filter(|_| is_tensor)
            }
            _ => None,
        }
    }

    /// The type and the byte range of a storage.
    fn storage(&self, node: Node) -> Option<(Result<TensorType, UnsupportedStorage>, Range<usize>)> {
        let Value::Storage(name) = *self.pickle.value(node) else { return None };
        let [_, class, key, ..] = *self.pickle.tuple(name)? else { return None };
        let Value::Global("torch", class) = *self.pickle.value(class) else { return None };
        let dtype = match class {
            "FloatStorage" => Ok(TensorType::F32),
            "HalfStorage" => Ok(TensorType::F16),
            "BFloat16Storage" => Ok(TensorType::BF16),
            // No weights have this type. A draft model stores token ids in it.
            "LongStorage" => Err(UnsupportedStorage::Type(I64.to_owned())),
            other => Err(UnsupportedStorage::Type(other.to_owned())),
        };
        let entry = format!("{}data/{}", self.folder, self.pickle.text(key)?);
        Some((dtype, self.entries.get(&*entry)?.clone()))
    }
}

/// The name of 64-bit integers in safetensors files.
const I64: &str = "I64";

/// Maximum number of axes of a tensor. No weight has more than four.
const AXES_MAX: usize = 8;

/// The number of elements of a tensor, which must be contiguous in its storage.
fn elements(shape: &[usize], strides: &[usize]) -> Result<usize, String> {
    if shape.len() != strides.len() {
        return Err("does not have one stride per axis".to_owned());
    }
    let mut elements = 1usize;
    for (extent, stride) in shape.iter().zip(strides).rev() {
        if *extent != 1 && *stride != elements {
            return Err(format!("has the strides {strides:?} for the shape {shape:?}, and is not contiguous"));
        }
        elements = elements.checked_mul(*extent).ok_or("has too many elements")?;
    }
    Ok(elements)
}

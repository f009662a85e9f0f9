//! The tensors of a module with a packed weight: their names, and the check of their shapes.

use super::{PackedFormat, PackedMatrix, PackedScheme};
use crate::checkpoint::{error::CheckpointError, shard::RawTensor, stored::TensorType};

/// Suffixes of the names of a module's tensors.
struct Suffixes {
    words: &'static str,
    scales: &'static str,
    zero_points: &'static str,
    groups: &'static str,
    /// The tensor with the shape of the weight.
    shape: Option<&'static str>,
}

impl PackedFormat {
    fn suffixes(self) -> Suffixes {
        let shape = (self == PackedFormat::CompressedTensors).then_some("weight_shape");
        match shape {
            None => Suffixes { words: "qweight", scales: "scales", zero_points: "qzeros", groups: "g_idx", shape },
            Some(_) => Suffixes {
                words: self.words(),
                scales: "weight_scale",
                zero_points: "weight_zero_point",
                groups: "weight_g_idx",
                shape,
            },
        }
    }

    /// The suffix of the name of the tensor with packed integers.
    pub(in crate::checkpoint) fn words(self) -> &'static str {
        if self == PackedFormat::CompressedTensors { "weight_packed" } else { "qweight" }
    }
}

/// The names of the tensors of a packed weight, and its scheme and shape.
#[derive(Clone, Debug)]
pub(in crate::checkpoint) struct PackedParts {
    scheme: PackedScheme,
    pub shape: [usize; 2],
    words: String,
    scales: String,
    zero_points: Option<String>,
    groups: Option<String>,
    shape_tensor: Option<String>,
}

impl PackedParts {
    /// Finds the parts of `module` among the tensors that `raw` returns, and checks their types and
    /// shapes. A shape is checked against the other tensors of the module. Whether the shape fits the
    /// model is checked later, when the model claims the weight.
    ///
    /// # Errors
    /// [`CheckpointError::MissingPart`] and [`CheckpointError::PackedTensor`].
    pub fn find<'a>(
        module: &str,
        scheme: PackedScheme,
        raw: impl Fn(&str) -> Option<RawTensor<'a>>,
    ) -> Result<Self, CheckpointError> {
        let suffixes = scheme.format.suffixes();
        let name = |suffix: &str| format!("{module}.{suffix}");
        let optional = |name: String| raw(&name).map(|found| (name, found));
        let required = |name: String| optional(name.clone()).ok_or(CheckpointError::MissingPart { tensor: name });
        let words = required(name(suffixes.words))?;
        let scales = required(name(suffixes.scales))?;
        let zero_points = scheme.has_zero_points.then(|| required(name(suffixes.zero_points))).transpose()?;
        let groups = name(suffixes.groups);
        let groups = if scheme.is_reordered { Some(required(groups)?) } else { optional(groups) };
        let stored_shape = suffixes.shape.map(|suffix| required(name(suffix))).transpose()?;

        let [first, second] = extents(&words)?;
        let per_word = scheme.per_word();
        let shape = match (&scheme.format, &stored_shape) {
            (PackedFormat::Awq, _) => [second * per_word, first],
            (_, Some(stored)) => read_shape(stored)?,
            // The number of columns need not be a multiple of the integers of a word.
            (_, None) => [second, groups.as_ref().map_or(first * per_word, |(_, groups)| elements(groups))],
        };
        let [rows, columns] = shape;
        let (packed_rows, packed_columns) = (rows.div_ceil(per_word), columns.div_ceil(per_word));
        let count = scheme.groups(columns);
        let (of_words, of_scales, of_zero_points) = match scheme.format {
            PackedFormat::Awq => ([columns, packed_rows], [count, rows], [count, packed_rows]),
            PackedFormat::Gptq | PackedFormat::GptqV2 => ([packed_columns, rows], [count, rows], [count, packed_rows]),
            PackedFormat::CompressedTensors => ([rows, packed_columns], [rows, count], [packed_rows, count]),
        };
        check(&words, "I32", &of_words)?;
        let kind = scales.1.kind.clone();
        let is_number = scale_type(&kind).is_some();
        check(&scales, if is_number { &kind } else { "F16, BF16 or F32" }, &of_scales)?;
        zero_points.iter().try_for_each(|found| check(found, "I32", &of_zero_points))?;
        groups.iter().try_for_each(|found| check(found, "I32", &[columns]))?;
        let named = |part: Option<(String, RawTensor<'_>)>| part.map(|(name, _)| name);
        Ok(PackedParts {
            scheme,
            shape,
            words: words.0,
            scales: scales.0,
            zero_points: named(zero_points),
            groups: named(groups),
            shape_tensor: named(stored_shape),
        })
    }

    /// The names of all parts.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let others = [&self.zero_points, &self.groups, &self.shape_tensor];
        [&self.words, &self.scales].into_iter().chain(others.into_iter().flatten()).map(String::as_str)
    }

    /// The weight, from the tensors that `raw` returns.
    pub fn matrix<'a>(&self, raw: impl Fn(&str) -> RawTensor<'a>) -> PackedMatrix<'a> {
        let scales = raw(&self.scales);
        PackedMatrix {
            scheme: self.scheme,
            shape: self.shape,
            words: raw(&self.words).bytes,
            scale_type: scale_type(&scales.kind).expect("the type of the scales was checked"),
            scales: scales.bytes,
            zero_points: self.zero_points.as_ref().map(|name| raw(name).bytes),
            groups: self.groups.as_ref().map(|name| raw(name).bytes),
        }
    }
}

/// The type of scales with this name; `None` if scales cannot have it.
fn scale_type(kind: &str) -> Option<TensorType> {
    match kind {
        "F16" => Some(TensorType::F16),
        "BF16" => Some(TensorType::BF16),
        "F32" => Some(TensorType::F32),
        _ => None,
    }
}

fn elements(tensor: &RawTensor<'_>) -> usize {
    tensor.shape.iter().product()
}

/// The extents of a matrix that is not empty.
fn extents((name, found): &(String, RawTensor<'_>)) -> Result<[usize; 2], CheckpointError> {
    match *found.shape {
        [first, second] if first * second > 0 => Ok([first, second]),
        _ => Err(wrong(name, found, "I32 with two axes")),
    }
}

/// The shape of the weight, which the file has as two integers.
fn read_shape((name, found): &(String, RawTensor<'_>)) -> Result<[usize; 2], CheckpointError> {
    let numbers: Vec<i64> = match (&*found.kind, found.shape) {
        ("I64", [2]) => found.bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
        ("I32", [2]) => found.bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes).into()).collect(),
        _ => return Err(wrong(name, found, "I64 [2]")),
    };
    // The limit keeps sums of these numbers within the range of `usize`.
    let extents = numbers.iter().filter_map(|number| u32::try_from(*number).ok().filter(|extent| *extent > 0));
    let extents: Vec<_> = extents.map(|extent| extent as usize).collect();
    extents.try_into().map_err(|_| wrong_as(name, format!("{numbers:?}"), "two numbers above 0"))
}

/// Checks the type and the shape of a part. Axes of scales with one element may be left out.
fn check((name, found): &(String, RawTensor<'_>), kind: &str, shape: &[usize]) -> Result<(), CheckpointError> {
    let inner = |shape: &[usize]| -> Vec<usize> { shape.iter().copied().filter(|extent| *extent != 1).collect() };
    if found.kind == kind && inner(found.shape) == inner(shape) {
        return Ok(());
    }
    Err(wrong(name, found, &format!("{kind} {shape:?}")))
}

fn wrong(name: &str, found: &RawTensor<'_>, expected: &str) -> CheckpointError {
    wrong_as(name, format!("{} {:?}", found.kind, found.shape), expected)
}

fn wrong_as(name: &str, found: String, expected: &str) -> CheckpointError {
    CheckpointError::PackedTensor { tensor: name.to_owned(), found, expected: expected.to_owned() }
}

//! The storage of tensors in a GGUF file: ggml's element types, and byte ranges.

use std::ops::Range;

use super::header::{Header, TensorEntry};
use crate::checkpoint::stored::{BlockType, Stored, TensorType};

/// The byte range of a tensor in the file. The range is empty for an unsupported type, because the
/// size of its elements is not known.
pub(super) fn bytes(tensor: &TensorEntry<'_>, header: &Header<'_>, file_bytes: usize) -> Result<Range<usize>, String> {
    let TensorEntry { name, shape, offset, .. } = tensor;
    let start = usize::try_from(*offset).ok().and_then(|offset| header.data.checked_add(offset));
    let beyond = || format!("the tensor {name} reaches beyond the {file_bytes} bytes of the file");
    let start = start.filter(|start| *start <= file_bytes).ok_or_else(beyond)?;
    if offset % header.alignment != 0 {
        return Err(format!("the tensor {name} is at {offset}, not a multiple of {}", header.alignment));
    }
    let Some(stored) = stored(tensor.kind) else { return Ok(start..start) };
    let row = shape.last().copied().unwrap_or(1);
    if !row.is_multiple_of(stored.elements()) {
        let (kind, block) = (type_name(tensor.kind), stored.elements());
        return Err(format!(
            "the tensor {name} has rows of {row} elements; expected a multiple of {block}, the block size of {kind}"
        ));
    }
    if shape.len() == 1 && stored.elements() > 1 {
        let kind = type_name(tensor.kind);
        return Err(format!("the tensor {name} is a vector of type {kind}; only matrices may be in blocks"));
    }
    let elements = shape.iter().try_fold(1usize, |product, extent| product.checked_mul(*extent));
    let end = elements.and_then(|elements| stored.bytes(elements)).and_then(|bytes| start.checked_add(bytes));
    Ok(start..end.filter(|end| *end <= file_bytes).ok_or_else(beyond)?)
}

/// The type that matrices are read as. All matrices of a file are read as one type, because
/// matrices that are fused later must have the same type.
pub(super) fn matrices_type(header: &Header<'_>) -> TensorType {
    let mut matrices = header.tensors.iter().filter(|tensor| tensor.shape.len() > 1).map(|tensor| stored(tensor.kind));
    match matrices.next() {
        Some(Some(Stored::Plain(first))) if matrices.all(|other| other == Some(Stored::Plain(first))) => first,
        _ => TensorType::F32,
    }
}

/// The storage of a type, which is given by its number in ggml. `None` if the type is not
/// supported.
pub(super) fn stored(kind: u32) -> Option<Stored> {
    Some(match kind {
        0 => Stored::Plain(TensorType::F32),
        1 => Stored::Plain(TensorType::F16),
        30 => Stored::Plain(TensorType::BF16),
        2 => Stored::Blocks(BlockType::Q4_0),
        3 => Stored::Blocks(BlockType::Q4_1),
        6 => Stored::Blocks(BlockType::Q5_0),
        7 => Stored::Blocks(BlockType::Q5_1),
        8 => Stored::Blocks(BlockType::Q8_0),
        12 => Stored::Blocks(BlockType::Q4_K),
        13 => Stored::Blocks(BlockType::Q5_K),
        14 => Stored::Blocks(BlockType::Q6_K),
        _ => return None,
    })
}

/// ggml's names of the types that are not supported: ggml-org/ggml, `include/ggml.h`, `ggml_type`.
const UNREAD: [(u32, &str); 22] = [
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

/// The name of a type, for messages.
pub(super) fn type_name(kind: u32) -> String {
    let unread = || UNREAD.iter().find(|(known, _)| *known == kind).map(|(_, name)| (*name).to_owned());
    match stored(kind) {
        Some(Stored::Plain(dtype)) => format!("{dtype:?}"),
        Some(Stored::Blocks(kind)) => format!("{kind:?}"),
        Some(Stored::Packed(_)) | None => unread().unwrap_or_else(|| format!("{kind}, which is unknown")),
    }
}

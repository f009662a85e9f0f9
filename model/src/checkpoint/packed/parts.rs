//! The tensors of a module with a packed weight: their names, and the check of their shapes.

use super::axes::Axes;
use super::matrix::PackedMatrix;
use super::names::PackedModule;
use super::scale::ScaleType;
use super::scheme::PackedScheme;
use crate::checkpoint::{error::CheckpointError, shard::RawTensor};

/// The names of the tensors of a packed weight, and its scheme and shape.
#[derive(Clone, Debug)]
pub(in crate::checkpoint) struct PackedParts {
    scheme: PackedScheme,
    /// `[rows, columns]`, or `[experts, rows, columns]` for the matrices of several experts.
    pub shape: Vec<usize>,
    words: String,
    scales: String,
    factors: Option<String>,
    zero_points: Option<String>,
    groups: Option<String>,
    /// Parts that are not needed to read elements.
    others: Vec<String>,
}

impl PackedParts {
    /// Finds the parts of `module` among the tensors that `raw` returns, and checks their types and
    /// shapes. A shape is checked against the other tensors of the module. Whether the shape fits
    /// the model is checked later, when the model claims the weight.
    ///
    /// # Errors
    /// [`CheckpointError::MissingPart`] and [`CheckpointError::PackedTensor`].
    pub fn find<'a>(
        module: &PackedModule,
        scheme: PackedScheme,
        raw: impl Fn(&str) -> Option<RawTensor<'a>>,
    ) -> Result<Self, CheckpointError> {
        let suffixes = scheme.format.suffixes();
        let optional = |name: String| raw(&name).map(|found| (name, found));
        let required = |suffix: &str| {
            let name = module.tensor(suffix);
            optional(name.clone()).ok_or(CheckpointError::MissingPart { tensor: name })
        };
        let words = required(suffixes.words)?;
        let scales = required(suffixes.scales)?;
        let zero_points = scheme.has_zero_points.then(|| required(suffixes.zero_points)).transpose()?;
        let groups = if scheme.is_reordered {
            Some(required(suffixes.groups)?)
        } else {
            optional(module.tensor(suffixes.groups))
        };
        let factors = suffixes.factors.map(required).transpose()?;
        let shape_tensor = suffixes.shape.map(|suffix| module.tensor(suffix));
        let unused = suffixes.unused.and_then(|suffix| optional(module.tensor(suffix)));

        let axes = axes(&words, scheme, module.is_flat)?;
        let stored_shape = match (shape_tensor, axes.experts) {
            (Some(name), None) => Some(optional(name.clone()).ok_or(CheckpointError::MissingPart { tensor: name })?),
            // For several matrices, tools store different shapes in this tensor. The tensor is
            // optional, because the other parts imply it.
            (Some(name), Some(_)) => optional(name),
            (None, _) => None,
        };
        let of_groups = groups.as_ref().map(|(_, groups)| groups.shape.iter().product());
        let [rows, columns] = match &stored_shape {
            Some(stored) if axes.experts.is_none() => read_shape(stored)?,
            _ => axes.matrix(scheme, of_groups),
        };
        let shapes = axes.parts(scheme, [rows, columns]);
        check(&words, scheme.format.word_type(), &shapes.words)?;
        let kind = scales.1.kind.clone();
        let is_known = ScaleType::of(scheme.format, &kind).is_some();
        check(&scales, if is_known { &kind } else { ScaleType::names(scheme.format) }, &shapes.scales)?;
        zero_points.iter().try_for_each(|found| check(found, "I32", &shapes.zero_points))?;
        groups.iter().try_for_each(|found| check(found, "I32", &[columns]))?;
        factors.iter().try_for_each(|found| check(found, "F32", &[axes.experts.unwrap_or(1)]))?;
        if let (Some(_), Some(zero_points), false) =
            (axes.experts, &zero_points, rows.is_multiple_of(scheme.per_word()))
        {
            return Err(wrong(&zero_points.0, &zero_points.1, "experts whose rows fill whole words of zero points"));
        }
        let named = |part: Option<(String, RawTensor<'_>)>| part.map(|(name, _)| name);
        Ok(PackedParts {
            scheme,
            shape: axes.experts.into_iter().chain([rows, columns]).collect(),
            words: words.0,
            scales: scales.0,
            factors: named(factors),
            zero_points: named(zero_points),
            groups: named(groups),
            others: named(stored_shape).into_iter().chain(named(unused)).collect(),
        })
    }

    /// Whether the weight has the matrices of all experts of a layer.
    pub fn has_experts(&self) -> bool {
        self.shape.len() == 3
    }

    /// The names of all parts.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let optional = [&self.factors, &self.zero_points, &self.groups].into_iter().flatten();
        [&self.words, &self.scales].into_iter().chain(optional).chain(&self.others).map(String::as_str)
    }

    /// The weight, from the tensors that `raw` returns. The rows of all experts form one matrix.
    pub fn matrix<'a>(&self, raw: impl Fn(&str) -> RawTensor<'a>) -> PackedMatrix<'a> {
        let (scales, [outer @ .., columns]) = (raw(&self.scales), &*self.shape) else {
            unreachable!("a packed weight has columns")
        };
        let scale_type = ScaleType::of(self.scheme.format, &scales.kind);
        PackedMatrix {
            scheme: self.scheme,
            shape: [outer.iter().product(), *columns],
            words: raw(&self.words).bytes,
            scale_type: scale_type.expect("the type of the scales was checked"),
            scales: scales.bytes,
            factors: self.factors.as_ref().map(|name| raw(name).bytes),
            zero_points: self.zero_points.as_ref().map(|name| raw(name).bytes),
            groups: self.groups.as_ref().map(|name| raw(name).bytes),
        }
    }

    /// The first scale that is not valid: the name of its tensor, its value, and what is expected.
    pub fn bad_scale<'a>(&self, raw: impl Fn(&str) -> RawTensor<'a>) -> Option<(String, f32, &'static str)> {
        let bad = self.matrix(raw).bad_scale()?;
        let factors = self.factors.as_ref().filter(|_| bad.is_factor);
        Some((factors.unwrap_or(&self.scales).clone(), bad.value, bad.expected))
    }
}

/// The axes of the packed elements. `is_of_experts` means that the tensor must have an axis for
/// experts.
fn axes(
    (name, found): &(String, RawTensor<'_>),
    scheme: PackedScheme,
    is_of_experts: bool,
) -> Result<Axes, CheckpointError> {
    match Axes::of(found.shape, scheme) {
        Some(axes) if axes.experts.is_some() || !is_of_experts => Ok(axes),
        Some(_) => Err(wrong(name, found, "three axes, the first one for experts")),
        None => Err(wrong(name, found, Axes::expected(scheme))),
    }
}

/// The shape of the weight, which the file stores as two integers.
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

/// Checks the type and the shape of a part. Axes of length 1 are ignored, because files may leave
/// out such axes of scales.
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

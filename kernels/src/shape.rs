//! Shapes of up to four dimensions, outermost first.

use std::fmt;

const RANK_MAX: usize = 4;

/// Maximum number of elements, which is more than fits in any memory. Up to this number, no product
/// of extents, pitches and element sizes overflows.
const ELEMENTS_MAX: usize = 1 << 56;

/// The extent of a tensor in each dimension, outermost first.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    extents: [usize; RANK_MAX],
    rank: usize,
}

impl Shape {
    /// Creates a shape of one to four extents. Panics on any other number of extents, or on more
    /// than `ELEMENTS_MAX` elements, where an extent of 0 counts as 1.
    pub fn new(extents: &[usize]) -> Self {
        assert!(
            (1..=RANK_MAX).contains(&extents.len()),
            "a shape has 1 to {RANK_MAX} dimensions, not {}",
            extents.len()
        );
        let elements = extents.iter().try_fold(1usize, |product, extent| product.checked_mul((*extent).max(1)));
        assert!(
            elements.is_some_and(|elements| elements <= ELEMENTS_MAX),
            "a shape of {extents:?} has more elements than any memory"
        );
        let mut shape = Shape { extents: [1; RANK_MAX], rank: extents.len() };
        shape.extents[..extents.len()].copy_from_slice(extents);
        shape
    }

    /// Returns the extents, outermost first.
    pub fn extents(&self) -> &[usize] {
        &self.extents[..self.rank]
    }

    /// Returns the outermost extent.
    pub fn rows(&self) -> usize {
        self.extents[0]
    }

    /// Returns the product of all extents except the outermost.
    pub fn columns(&self) -> usize {
        self.extents[1..self.rank].iter().product()
    }

    /// Returns the product of all extents.
    pub fn elements(&self) -> usize {
        self.rows() * self.columns()
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(extents: [usize; N]) -> Self {
        Shape::new(&extents)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.extents())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "more elements than any memory")]
    fn shape_extents_whose_product_overflows_panic() {
        Shape::new(&[1 << 33, 1 << 31]);
    }

    #[test]
    #[should_panic(expected = "more elements than any memory")]
    fn an_overflow_panics_even_with_an_empty_dimension() {
        Shape::new(&[0, 1 << 40, 1 << 40]);
    }
}

//! Sizes that kernels are compiled for. Each size is a template parameter on the device and a
//! suffix of the kernel's name.

use std::ops::Index;

/// Head dimensions (elements per head) that attention over the KV cache is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadDim {
    D32,
    D64,
    D80,
    D128,
    D256,
    D512,
}

impl HeadDim {
    pub(crate) const ALL: [HeadDim; 6] =
        [HeadDim::D32, HeadDim::D64, HeadDim::D80, HeadDim::D128, HeadDim::D256, HeadDim::D512];

    /// Elements per head, in the order of [`HeadDim::ALL`].
    pub(crate) const ELEMENTS: [usize; HeadDim::ALL.len()] = [32, 64, 80, 128, 256, 512];

    pub(crate) const fn elements(self) -> usize {
        HeadDim::ELEMENTS[self as usize]
    }

    /// Returns the variant with exactly `elements` elements, if there is one.
    pub(crate) fn of(elements: usize) -> Option<Self> {
        HeadDim::ALL.into_iter().find(|size| size.elements() == elements)
    }
}

/// Head dimensions (elements per head) for which attention over the KV cache has kernels for many
/// rows on Hopper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HopperHeadDim {
    D128,
    D256,
}

impl HopperHeadDim {
    pub(crate) const ALL: [HopperHeadDim; 2] = [HopperHeadDim::D128, HopperHeadDim::D256];

    pub(crate) const fn elements(self) -> usize {
        match self {
            HopperHeadDim::D128 => 128,
            HopperHeadDim::D256 => 256,
        }
    }

    /// Returns the variant with exactly `elements` elements, if there is one.
    pub(crate) fn of(elements: usize) -> Option<Self> {
        HopperHeadDim::ALL.into_iter().find(|size| size.elements() == elements)
    }
}

/// Head dimensions (elements per head) that attention within packed sequences is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PackedHeadDim {
    D32,
    D64,
    D72,
    D80,
    D128,
}

impl PackedHeadDim {
    pub(crate) const ALL: [PackedHeadDim; 5] =
        [PackedHeadDim::D32, PackedHeadDim::D64, PackedHeadDim::D72, PackedHeadDim::D80, PackedHeadDim::D128];

    /// Elements per head, in the order of [`PackedHeadDim::ALL`].
    pub(crate) const ELEMENTS: [usize; PackedHeadDim::ALL.len()] = [32, 64, 72, 80, 128];

    /// Head dimensions of the kernel for many short sequences (windows).
    pub(crate) const OF_WINDOWS: [PackedHeadDim; 4] =
        [PackedHeadDim::D32, PackedHeadDim::D64, PackedHeadDim::D72, PackedHeadDim::D80];

    pub(crate) const fn elements(self) -> usize {
        PackedHeadDim::ELEMENTS[self as usize]
    }

    /// Returns the variant with exactly `elements` elements, if there is one.
    pub(crate) fn of(elements: usize) -> Option<Self> {
        PackedHeadDim::ALL.into_iter().find(|size| size.elements() == elements)
    }
}

/// Maximum number of rows of x that a kernel for few rows accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SmallMRows {
    R8,
    R16,
    R32,
    R64,
    /// Only for weights of 4-bit integers on Hopper.
    R128,
}

impl SmallMRows {
    pub(crate) const ALL: [SmallMRows; 5] =
        [SmallMRows::R8, SmallMRows::R16, SmallMRows::R32, SmallMRows::R64, SmallMRows::R128];

    /// Sizes of kernels for all formats of weights.
    pub(crate) const UP_TO_64: [SmallMRows; 4] = [SmallMRows::R8, SmallMRows::R16, SmallMRows::R32, SmallMRows::R64];

    pub(crate) const fn rows(self) -> usize {
        match self {
            SmallMRows::R8 => 8,
            SmallMRows::R16 => 16,
            SmallMRows::R32 => 32,
            SmallMRows::R64 => 64,
            SmallMRows::R128 => 128,
        }
    }

    /// Returns the smallest of `sizes` with at least `rows` rows. Returns `None` for 0 rows, or for
    /// more rows than the largest size has.
    pub(crate) fn holding(sizes: &[SmallMRows], rows: usize) -> Option<Self> {
        sizes.iter().copied().find(|size| (1..=size.rows()).contains(&rows))
    }
}

/// A value for each [`HeadDim`].
pub(crate) struct ByHeadDim<T>(pub [T; HeadDim::ALL.len()]);

impl<T> Index<HeadDim> for ByHeadDim<T> {
    type Output = T;

    fn index(&self, size: HeadDim) -> &T {
        &self.0[size as usize]
    }
}

/// A value for each [`HopperHeadDim`].
pub(crate) struct ByHopperHeadDim<T>(pub [T; HopperHeadDim::ALL.len()]);

impl<T> Index<HopperHeadDim> for ByHopperHeadDim<T> {
    type Output = T;

    fn index(&self, size: HopperHeadDim) -> &T {
        &self.0[size as usize]
    }
}

/// A value for each [`PackedHeadDim`].
pub(crate) struct ByPackedHeadDim<T>(pub [T; PackedHeadDim::ALL.len()]);

impl<T> Index<PackedHeadDim> for ByPackedHeadDim<T> {
    type Output = T;

    fn index(&self, size: PackedHeadDim) -> &T {
        &self.0[size as usize]
    }
}

/// A value for each of the first `N` sizes in [`SmallMRows::ALL`].
pub(crate) struct BySmallMRows<T, const N: usize = { SmallMRows::UP_TO_64.len() }>(pub [T; N]);

impl<T, const N: usize> Index<SmallMRows> for BySmallMRows<T, N> {
    type Output = T;

    fn index(&self, size: SmallMRows) -> &T {
        &self.0[size as usize]
    }
}

/// Maximum number of rows of x per thread block, for each of `gemm_tiled_e4m3.cu`'s
/// kernels for few rows.
pub(in crate::cuda) const TILED_ROWS: [usize; 3] = [8, 16, 32];

/// Number of places (positions in the list of choices sorted by expert)
/// per tile of `experts_small_m.cu`.
pub(in crate::cuda) const PLACES: [usize; 4] = [8, 16, 24, 32];

/// Number of features per tile of `gemm_medium_m.cu`. A tile has this many rows of the gate weight
/// and as many of the up weight.
pub(in crate::cuda) const GATED_WIDTHS: [usize; 3] = [80, 96, 112];

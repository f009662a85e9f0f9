//! Tensor maps, which describe tensors to Hopper's copy engine (TMA).

use bursar_budgets::{Address, CudaDevice, DeviceError};
use cudarc::driver::sys;

use super::arguments::{Argument, count};
use crate::DType;

/// The driver's opaque 128-byte tensor map, which a kernel takes by value.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(super) struct TensorMap([u64; 16]);

impl Argument for TensorMap {}

/// The pattern by which the rows of a box are distributed over the banks of shared memory.
#[derive(Clone, Copy)]
pub(super) enum Swizzle {
    None,
    Bytes32,
    Bytes128,
}

/// The layout of a tensor as the copy engine requires it, innermost dimension first.
pub(super) struct Layout<'a> {
    pub dimensions: &'a [u64],
    /// Bytes from one element to the next, in each dimension except the innermost.
    pub strides: &'a [u64],
    /// Elements per dimension that one copy transfers.
    pub cube: &'a [u32],
    pub swizzle: Swizzle,
}

/// Dimensions of a matrix. `pitch` is the number of elements from the start of one row to the
/// start of the next.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub rows: usize,
    pub columns: usize,
    pub pitch: usize,
}

impl TensorMap {
    /// Creates a map of the matrix at `address`. One copy transfers a box of `cube` rows and
    /// columns, 128 bytes wide.
    pub(super) fn of_rows(address: u64, dtype: DType, of: Rows, cube: [usize; 2]) -> Result<Self, DeviceError> {
        let layout = Layout {
            dimensions: &[of.columns as u64, of.rows as u64],
            strides: &[dtype.bytes(of.pitch).0],
            cube: &[count(cube[1]), count(cube[0])],
            swizzle: Swizzle::Bytes128,
        };
        TensorMap::new(Address(address), dtype, &layout)
    }

    /// Creates a map of the tensor at `address`. The driver computes the map on the
    /// host, without the device.
    pub(super) fn new(address: Address, dtype: DType, layout: &Layout<'_>) -> Result<Self, DeviceError> {
        use sys::{
            CUtensorMapDataType_enum as Type, CUtensorMapFloatOOBfill_enum as Outside,
            CUtensorMapInterleave_enum as Interleave, CUtensorMapL2promotion_enum as Promotion,
            CUtensorMapSwizzle_enum as Pattern,
        };
        /// A tensor map with the alignment that the driver requires, 64 bytes.
        #[repr(C, align(64))]
        struct Aligned(sys::CUtensorMap);
        let rank = layout.dimensions.len();
        assert!(
            layout.strides.len() + 1 == rank && layout.cube.len() == rank,
            "each dimension has a cube extent, and each except the innermost has a stride"
        );
        let element = match dtype {
            DType::BF16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DType::U32 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT32,
            dtype if dtype.needs_scales() => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            _ => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        };
        let pattern = match layout.swizzle {
            Swizzle::None => Pattern::CU_TENSOR_MAP_SWIZZLE_NONE,
            Swizzle::Bytes32 => Pattern::CU_TENSOR_MAP_SWIZZLE_32B,
            Swizzle::Bytes128 => Pattern::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let ones = [1u32; 5];
        // SAFETY: the struct consists of numbers, for which all-zero bytes are valid.
        let mut map: Aligned = unsafe { std::mem::zeroed() };
        // SAFETY: the map is writable, and every list has an entry for each dimension.
        let encoded = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map.0,
                element,
                rank as u32,
                address.0 as *mut _,
                layout.dimensions.as_ptr(),
                layout.strides.as_ptr(),
                layout.cube.as_ptr(),
                ones.as_ptr(),
                Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                pattern,
                Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                Outside::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        CudaDevice::check("cuTensorMapEncodeTiled", encoded)?;
        // SAFETY: both types are 128 bytes of numbers.
        Ok(TensorMap(unsafe { std::mem::transmute::<sys::CUtensorMap, [u64; 16]>(map.0) }))
    }
}

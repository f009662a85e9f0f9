//! Random weights: the numbers do not depend on the number of threads, and they have the requested
//! distribution.

use bursar_budgets::Bytes;
use bursar_kernels::{
    Cpu, DType, KernelError, Tensor,
    ops::{
        fill_random::{MatrixSlice, fill_random, fill_random_part},
        transfer,
    },
};
use half::{bf16, f16};

use crate::ground::poisoned;

/// Numbers of type `dtype`, drawn by `threads` threads.
fn drawn(threads: usize, count: usize, dtype: DType, seed: u64, deviation: f32) -> Vec<f32> {
    let (cpu, workspace) = (Cpu::new(threads), poisoned(Bytes::mib(1)));
    // SAFETY: the workspace has backed this many bytes, and no other tensor uses them.
    let mut out = unsafe { Tensor::persistent(workspace.address(), [count], dtype) };
    fill_random(&cpu, seed, deviation, &mut out).expect("a contiguous tensor of floats");
    // SAFETY: all bytes of `out` have just been written.
    let bytes = unsafe { std::slice::from_raw_parts(out.address().0 as *const u8, out.bytes().as_usize()) };
    let widen = |element: &[u8]| match *element {
        [low, high] if dtype == DType::BF16 => bf16::from_le_bytes([low, high]).to_f32(),
        [low, high] => f16::from_le_bytes([low, high]).to_f32(),
        _ => f32::from_le_bytes(element.try_into().expect("four bytes")),
    };
    bytes.chunks_exact(dtype.size()).map(widen).collect()
}

#[test]
fn random_weights_depend_only_on_the_seed() {
    let count = 3 * (1 << 14) + 61;
    let alone = drawn(1, count, DType::F32, 7, 0.02);
    assert_eq!(alone, drawn(3, count, DType::F32, 7, 0.02), "the number of threads does not change the numbers");
    assert_eq!(
        alone[..61],
        drawn(1, 61, DType::F32, 7, 0.02),
        "the numbers drawn after them do not change the first numbers"
    );
    let other = drawn(1, count, DType::F32, 8, 0.02);
    let equal = alone.iter().zip(&other).filter(|(one, other)| one == other).count();
    assert!(equal < count / 1000, "{equal} of {count} numbers are equal for different seeds");
}

#[test]
fn a_matrix_slice_gets_the_numbers_of_the_whole_matrix() {
    let (seed, rows, columns) = (5, 37, 53);
    let whole = drawn(1, rows * columns, DType::F32, seed, 1.0);
    for (rows, of_row) in [(0..rows, 17..53), (3..29, 0..columns), (36..37, 52..53)] {
        let (cpu, workspace) = (Cpu::new(2), poisoned(Bytes::mib(1)));
        // SAFETY: the workspace has backed this many bytes, and no other tensor uses them.
        let mut out = unsafe { Tensor::persistent(workspace.address(), [rows.len(), of_row.len()], DType::F32) };
        let part = MatrixSlice { seed, first: (rows.start * columns + of_row.start) as u64, pitch: columns };
        fill_random_part(&cpu, part, 1.0, &mut out).expect("a contiguous tensor of floats");
        // SAFETY: all bytes of `out` have just been written.
        let found = unsafe { std::slice::from_raw_parts(out.address().0 as *const f32, rows.len() * of_row.len()) };
        let expected: Vec<f32> = rows.flat_map(|row| whole[row * columns..][of_row.clone()].to_vec()).collect();
        assert!(found == expected, "{of_row:?}");
    }
}

#[test]
fn random_weights_in_narrow_types_are_the_f32_numbers_rounded() {
    let (whole, count) = (drawn(2, 4099, DType::F32, 3, 1.0), 4099);
    for (dtype, unit) in [(DType::BF16, 2f32.powi(-8)), (DType::F16, 2f32.powi(-11))] {
        let narrow = drawn(2, count, dtype, 3, 1.0);
        for (narrow, whole) in narrow.iter().zip(&whole) {
            assert!((narrow - whole).abs() <= whole.abs() * unit + 1e-7, "{narrow} is not {whole} rounded to {dtype}");
        }
    }
}

#[test]
fn random_weights_have_the_requested_mean_deviation_and_kurtosis() {
    let (count, deviation) = (200_000, 0.02f32);
    let numbers: Vec<f64> = drawn(2, count, DType::F32, 11, deviation).into_iter().map(f64::from).collect();
    let moment =
        |power: i32| numbers.iter().map(|x| (x / f64::from(deviation)).powi(power)).sum::<f64>() / count as f64;
    assert!(moment(1).abs() < 0.01, "the mean is {} deviations", moment(1));
    assert!((moment(2) - 1.0).abs() < 0.01, "the variance is {} times the requested variance", moment(2));
    // The sum of four uniform numbers has a kurtosis of 3 - 6 / 5 / 4 = 2.7. A single uniform
    // number has 1.8, and a normal one 3.
    assert!((moment(4) - 2.7).abs() < 0.05, "the kurtosis is {}", moment(4));
    assert!(numbers.iter().all(|x| x.abs() <= 3.5 * f64::from(deviation)), "no number is more than 3.5 deviations out");
    let adjacent = numbers.windows(2).map(|pair| pair[0] * pair[1]).sum::<f64>() / count as f64;
    assert!(adjacent.abs() < 0.01 * f64::from(deviation * deviation), "adjacent numbers are independent");
}

#[test]
fn filling_an_index_tensor_with_random_weights_is_refused() {
    let workspace = poisoned(Bytes::kib(64));
    // SAFETY: the workspace has backed this many bytes, and no other tensor uses them.
    let mut indices = unsafe { Tensor::persistent(workspace.address(), [4], DType::U32) };
    transfer::fill(&Cpu::new(1), &[0; 16], &mut indices).expect("the indices are uploaded");
    let refused = fill_random(&Cpu::new(1), 1, 1.0, &mut indices);
    assert!(matches!(refused, Err(KernelError::Type { op: "fill_random", .. })), "{refused:?}");
}

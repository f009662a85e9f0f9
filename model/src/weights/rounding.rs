//! Rounding of numbers from one type to another. `half` converts a slice of f16 with CPU
//! instructions, several times faster than one number at a time.

use bursar_kernels::DType;
use half::{bf16, f16, slice::HalfFloatSliceExt};
use rayon::prelude::*;

/// Number of elements that one thread converts at a time.
const BY_A_THREAD: usize = 1 << 16;

/// Number of elements that are widened and then rounded at a time, few enough to fit into the cache
/// of a CPU core.
const AT_ONCE: usize = 1 << 10;

/// Rounds the numbers of a file (little-endian, of type `found`) to the nearest numbers of type
/// `kept`, at most `most` numbers at a time. The buffer `buffer` grows as needed. `each` receives
/// one part after the other.
pub(super) fn rounded_parts<E>(
    source: &[u8],
    (found, kept): (DType, DType),
    most: usize,
    buffer: &mut Vec<u8>,
    mut each: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    source.chunks(most * found.size()).try_for_each(|part| {
        let out = buffer_for(buffer, part.len() / found.size() * kept.size());
        round(part, found, out, kept);
        each(out)
    })
}

/// The first `bytes` bytes of `buffer`, which grows if it is smaller. The bytes keep their old
/// content.
pub(super) fn buffer_for(buffer: &mut Vec<u8>, bytes: usize) -> &mut [u8] {
    buffer.resize(buffer.len().max(bytes), 0);
    &mut buffer[..bytes]
}

/// Rounds all of `source`, on all threads.
fn round(source: &[u8], found: DType, out: &mut [u8], kept: DType) {
    assert_eq!(source.len() / found.size(), out.len() / kept.size(), "the output holds as many numbers as the source");
    let parts = source.par_chunks(BY_A_THREAD * found.size());
    let places = out.par_chunks_mut(BY_A_THREAD * kept.size());
    parts.zip(places).for_each(|(source, out)| {
        let mut wide = [0.0; AT_ONCE];
        for (source, out) in source.chunks(AT_ONCE * found.size()).zip(out.chunks_mut(AT_ONCE * kept.size())) {
            let wide = &mut wide[..out.len() / kept.size()];
            widen(source, found, wide);
            narrow(wide, out, kept);
        }
    });
}

fn widen(source: &[u8], found: DType, wide: &mut [f32]) {
    match found {
        DType::F16 => widen_half(source, f16::from_le_bytes, f16::ZERO, wide),
        DType::BF16 => widen_half(source, bf16::from_le_bytes, bf16::ZERO, wide),
        DType::F32 => read(source, f32::from_le_bytes, wide),
        found => unreachable!("weights of a file are not {found}"),
    }
}

/// Widens numbers of a file to f32, in slices of any length.
pub(super) fn widen_all(source: &[u8], found: DType, wide: &mut [f32]) {
    let parts = source.chunks(AT_ONCE * found.size());
    parts.zip(wide.chunks_mut(AT_ONCE)).for_each(|(source, wide)| widen(source, found, wide));
}

/// Widens numbers of a file to f32 and writes their bytes to `out`.
pub(super) fn widen_to_bytes(source: &[u8], found: DType, out: &mut [u8]) {
    widen_scaled_to_bytes(source, found, 1.0, out);
}

/// Like [`widen_to_bytes`], with each number multiplied by `scale`.
pub(super) fn widen_scaled_to_bytes(source: &[u8], found: DType, scale: f32, out: &mut [u8]) {
    let mut wide = [0.0; AT_ONCE];
    for (source, out) in source.chunks(AT_ONCE * found.size()).zip(out.chunks_mut(AT_ONCE * size_of::<f32>())) {
        let wide = &mut wide[..out.len() / size_of::<f32>()];
        widen(source, found, wide);
        let places = out.as_chunks_mut().0.iter_mut();
        places.zip(&*wide).for_each(|(place, number)| *place = (number * scale).to_ne_bytes());
    }
}

fn widen_half<T: Copy>(source: &[u8], from: impl Fn([u8; 2]) -> T, zero: T, wide: &mut [f32])
where
    [T]: HalfFloatSliceExt,
{
    let narrow = &mut [zero; AT_ONCE][..wide.len()];
    read(source, from, narrow);
    narrow.convert_to_f32_slice(wide);
}

fn read<T, const SIZE: usize>(source: &[u8], from: impl Fn([u8; SIZE]) -> T, out: &mut [T]) {
    out.iter_mut().zip(source.as_chunks().0).for_each(|(place, bytes)| *place = from(*bytes));
}

/// Rounds f32 to the nearest numbers of type `kept` and writes their bytes to `out`.
pub(super) fn narrow(wide: &[f32], out: &mut [u8], kept: DType) {
    match kept {
        DType::F16 => narrow_to_half(wide, f16::to_ne_bytes, f16::ZERO, out),
        DType::BF16 => narrow_to_half(wide, bf16::to_ne_bytes, bf16::ZERO, out),
        DType::F32 => {
            out.as_chunks_mut().0.iter_mut().zip(wide).for_each(|(place, number)| *place = number.to_ne_bytes())
        }
        kept => unreachable!("no target keeps weights as {kept}"),
    }
}

fn narrow_to_half<T: Copy>(wide: &[f32], to: impl Fn(T) -> [u8; 2], zero: T, out: &mut [u8])
where
    [T]: HalfFloatSliceExt,
{
    let narrow = &mut [zero; AT_ONCE][..wide.len()];
    narrow.convert_from_f32_slice(wide);
    out.as_chunks_mut().0.iter_mut().zip(narrow).for_each(|(place, number)| *place = to(*number));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_many_threads_round_in_parts_is_each_number_in_its_place_to_the_last() {
        let most = BY_A_THREAD + AT_ONCE + 3;
        let count = 2 * most + AT_ONCE + 1;
        let numbers: Vec<f32> = (0..count).map(|at| (at as f32 - 70_000.0) / 977.0).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let parts = |bytes: &[u8], types| {
            let (mut buffer, mut out, mut count) = (vec![0xff; 5], Vec::new(), 0);
            let each = |part: &[u8]| {
                out.extend_from_slice(part);
                count += 1;
                Ok::<_, ()>(())
            };
            rounded_parts(bytes, types, most, &mut buffer, each).expect("rounding reports no error");
            assert_eq!(count, 3);
            out
        };
        let rounded = |number: f32, dtype: DType| match dtype {
            DType::F16 => (f16::from_f32(number).to_ne_bytes(), f16::from_f32(number).to_f32()),
            _ => (bf16::from_f32(number).to_ne_bytes(), bf16::from_f32(number).to_f32()),
        };
        for (kept, other) in [(DType::BF16, DType::F16), (DType::F16, DType::BF16)] {
            let once = parts(&bytes, (DType::F32, kept));
            let twice = parts(&once, (kept, other));
            assert_eq!((once.len(), twice.len()), (2 * count, 2 * count));
            for (at, number) in numbers.iter().enumerate() {
                let (first, number) = rounded(*number, kept);
                assert_eq!(once[2 * at..][..2], first, "number {at} as {kept}");
                assert_eq!(twice[2 * at..][..2], rounded(number, other).0, "number {at} as {kept} and {other}");
            }
        }
    }

    #[test]
    fn parts_end_with_the_first_that_fails() {
        let mut received = 0;
        let each = |_: &[u8]| {
            received += 1;
            if received == 2 { Err("full") } else { Ok(()) }
        };
        let outcome = rounded_parts(&[0; 40], (DType::F32, DType::F16), 3, &mut Vec::new(), each);
        assert_eq!((outcome, received), (Err("full"), 2));
    }
}

//! Antialiased resampling of 8-bit pictures with results bit-identical to torch on a CPU.
//!
//! transformers' default backend calls
//! `torchvision.transforms.v2.functional.resize(antialias=True)` on u8 tensors, which runs
//! `upsample_avx_bilinear_bicubic_uint8` (ATen/native/cpu/UpSampleKernelAVXAntialias.h, torch 2.11;
//! derived from Pillow's Resample.c). It is a separable filter that runs first along rows and then
//! along columns, with a rounding to u8 in between. The i16 weights have the largest precision that
//! fits. Pillow's own results differ by a level or two, because its weights are wider.

use bursar_budgets::Bytes;
use rayon::prelude::*;

use super::smart_resize::Size;
use crate::flow::rgb_image::RgbImage;

const CHANNELS: usize = 3;

/// The filter of a resize.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resample {
    /// Triangle filter, number 2 in PIL.
    Bilinear,
    /// Keys' cubic filter with a = -0.5, number 3 in PIL.
    Bicubic,
}

impl Resample {
    /// Half of the filter's width, in pixels of the coarser of source and target.
    pub fn support(self) -> f64 {
        match self {
            Resample::Bilinear => 1.0,
            Resample::Bicubic => 2.0,
        }
    }

    /// Value of the filter at a distance from its center (Keys, "Cubic convolution interpolation",
    /// 1981, with a = -0.5).
    pub fn weight(self, distance: f64) -> f64 {
        const A: f64 = -0.5;
        let x = distance.abs();
        match self {
            Resample::Bilinear if x < 1.0 => 1.0 - x,
            Resample::Bicubic if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
            Resample::Bicubic if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
            _ => 0.0,
        }
    }
}

/// Resizes `picture` to `size`.
///
/// Takes at most [`resize_bytes`] of host memory, for the result and for the picture between the
/// passes, and a few buffers of one band.
pub fn resize(picture: &RgbImage, size: Size, filter: Resample) -> RgbImage {
    let (width, height) = (picture.width() as usize, picture.height() as usize);
    let (wide, tall) = (size.width as usize, size.height as usize);
    let across;
    let rows = if wide == width {
        picture.data()
    } else {
        across = resize_rows(picture.data(), width, height, &AxisWeights::new(width, wide, filter));
        &across
    };
    let data = if tall == height {
        rows.to_vec()
    } else {
        resize_columns(rows, wide * CHANNELS, &AxisWeights::new(height, tall, filter))
    };
    RgbImage::new(size.width, size.height, data).expect("both passes fill the given size")
}

/// Upper bound on the host bytes that [`resize`] takes in addition to its input: the picture
/// between the passes, and the result.
pub fn resize_bytes(source: Size, target: Size) -> Bytes {
    let between = Size { width: target.width, height: source.height };
    between.rgb_bytes() + target.rgb_bytes()
}

/// Input range and weights of each output along one axis.
struct AxisWeights {
    first: Vec<usize>,  // [outputs]
    counts: Vec<usize>, // [outputs]
    taps: usize,
    weights: Vec<i16>, // [outputs, taps]
    precision: u32,
}

impl AxisWeights {
    fn new(inputs: usize, outputs: usize, filter: Resample) -> Self {
        let scale = inputs as f64 / outputs as f64;
        let stretch = scale.max(1.0);
        let support = filter.support() * stretch;
        let taps = support.ceil() as usize * 2 + 1;
        let (mut first, mut counts) = (Vec::with_capacity(outputs), Vec::with_capacity(outputs));
        let mut exact = vec![0.0; outputs * taps];
        for (output, row) in exact.chunks_exact_mut(taps).enumerate() {
            let center = scale * (output as f64 + 0.5);
            // `as` truncates toward zero and saturates, like the C cast followed by
            // `max(.., 0)` in the original.
            let start = (center - support + 0.5) as usize;
            let count = ((center + support + 0.5) as usize).min(inputs).saturating_sub(start).min(taps);
            let inverse = 1.0 / stretch;
            for (tap, weight) in row[..count].iter_mut().enumerate() {
                *weight = filter.weight((((tap + start) as f64) - center + 0.5) * inverse);
            }
            let total: f64 = row[..count].iter().sum();
            if total != 0.0 {
                row[..count].iter_mut().for_each(|weight| *weight /= total);
            }
            first.push(start);
            counts.push(count);
        }
        let precision = precision_bits(exact.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        let weights = exact.iter().map(|&weight| quantize(weight, precision)).collect();
        AxisWeights { first, counts, taps, weights, precision }
    }

    fn of(&self, output: usize) -> (usize, &[i16]) {
        (self.first[output], &self.weights[output * self.taps..][..self.counts[output]])
    }

    /// Half of a level in fixed point. Sums start at this value, so that the final shift rounds to
    /// nearest.
    fn half(&self) -> i32 {
        (1 << self.precision) >> 1
    }
}

/// Maximum number of fractional bits, at most 22, with which the largest weight still fits in i16.
fn precision_bits(weight_max: f64) -> u32 {
    (0..22).find(|&bits| (0.5 + weight_max * f64::from(1u32 << (bits + 1))) as i64 >= 1 << 15).unwrap_or(22)
}

fn quantize(weight: f64, precision: u32) -> i16 {
    let scaled = weight * f64::from(1u32 << precision);
    (scaled + if weight < 0.0 { -0.5 } else { 0.5 }) as i16
}

fn clip(sum: i32, precision: u32) -> u8 {
    (sum >> precision).clamp(0, 255) as u8
}

/// Number of rows that are filtered together. The inner loop then runs over 24 adjacent bytes
/// instead of 3, so the compiler can use vector instructions. That halved the time to resize
/// 1920 x 1080 pixels.
const BAND_ROWS: usize = 8;
/// Bytes of one column of a band.
const BAND_BYTES: usize = BAND_ROWS * CHANNELS;

fn resize_rows(data: &[u8], width: usize, height: usize, axis: &AxisWeights) -> Vec<u8> {
    let wide = axis.first.len();
    let mut resized = vec![0; wide * height * CHANNELS]; // [height, wide, 3]
    let bands = data.par_chunks(width * BAND_BYTES).with_min_len(2);
    bands.zip(resized.par_chunks_mut(wide * BAND_BYTES)).for_each_init(
        || vec![[0; BAND_BYTES]; width], // [width, BAND_ROWS, 3]
        |columns, (from, to)| {
            gather_columns(from, columns);
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the check in the line above found that the CPU has AVX2.
                return unsafe { resize_band_avx2(columns, axis, to) };
            }
            resize_band(columns, axis, to);
        },
    );
    resized
}

/// `[rows, width, 3]` to `[width, rows, 3]`. If the last band has fewer rows, leftover rows of the
/// previous band are filtered too, and their results are dropped.
fn gather_columns(band: &[u8], columns: &mut [[u8; BAND_BYTES]]) {
    for (row, line) in band.chunks_exact(columns.len() * CHANNELS).enumerate() {
        for (column, pixel) in columns.iter_mut().zip(line.chunks_exact(CHANNELS)) {
            column[row * CHANNELS..][..CHANNELS].copy_from_slice(pixel);
        }
    }
}

/// Same code as `resize_band`, compiled for wider vectors, because baseline x86-64
/// guarantees only 16 bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn resize_band_avx2(columns: &[[u8; BAND_BYTES]], axis: &AxisWeights, band: &mut [u8]) {
    resize_band(columns, axis, band);
}

#[inline(always)]
fn resize_band(columns: &[[u8; BAND_BYTES]], axis: &AxisWeights, band: &mut [u8]) {
    let wide = axis.first.len();
    for output in 0..wide {
        let (first, weights) = axis.of(output);
        let mut sums = [axis.half(); BAND_BYTES];
        for (column, &weight) in columns[first..].iter().zip(weights) {
            for (sum, &color) in sums.iter_mut().zip(column) {
                *sum += i32::from(color) * i32::from(weight);
            }
        }
        let bytes = sums.map(|sum| clip(sum, axis.precision));
        for (line, pixel) in band.chunks_exact_mut(wide * CHANNELS).zip(bytes.chunks_exact(CHANNELS)) {
            line[output * CHANNELS..][..CHANNELS].copy_from_slice(pixel);
        }
    }
}

fn resize_columns(data: &[u8], row_bytes: usize, axis: &AxisWeights) -> Vec<u8> {
    let tall = axis.first.len();
    let mut resized = vec![0; tall * row_bytes]; // [tall, row_bytes]
    resized.par_chunks_exact_mut(row_bytes).with_min_len(8).enumerate().for_each(|(output, to)| {
        let (first, weights) = axis.of(output);
        let rows = &data[first * row_bytes..][..weights.len() * row_bytes];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the check in the line above found that the CPU has AVX2.
            return unsafe { blend_rows_avx2(rows, weights, axis, to) };
        }
        blend_rows(rows, weights, axis, to);
    });
    resized
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn blend_rows_avx2(rows: &[u8], weights: &[i16], axis: &AxisWeights, blended: &mut [u8]) {
    blend_rows(rows, weights, axis, blended);
}

#[inline(always)]
fn blend_rows(rows: &[u8], weights: &[i16], axis: &AxisWeights, blended: &mut [u8]) {
    /// Number of sums that stay in the L1 cache while all taps are added to them.
    const STRIP: usize = 1024;
    let mut sums = [0; STRIP];
    let row_bytes = blended.len();
    for (strip, bytes) in blended.chunks_mut(STRIP).enumerate() {
        let sums = &mut sums[..bytes.len()];
        sums.fill(axis.half());
        for (row, &weight) in rows.chunks_exact(row_bytes).zip(weights) {
            for (sum, &color) in sums.iter_mut().zip(&row[strip * STRIP..][..bytes.len()]) {
                *sum += i32::from(color) * i32::from(weight);
            }
        }
        bytes.iter_mut().zip(sums).for_each(|(byte, sum)| *byte = clip(*sum, axis.precision));
    }
}

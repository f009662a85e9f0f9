//! The roofline: the shortest time in which a device can run some passes. It follows from the
//! operations and bytes that a plan of these passes counts (Williams, Waterman, Patterson,
//! "Roofline", 2009).

use std::iter;

use bursar_kernels::{BLOCK_TOKENS, KernelError, Target, Work};
use bursar_model::{
    Model,
    flow::{BlockTable, Grid, SequencePart, StateSlots, StepBatch},
    worst_cases::{self, Pass},
};
use serde::Serialize;

/// The rates of a device.
#[derive(Clone, Debug, Serialize)]
pub struct Rates {
    /// Operations per second on 16-bit operands. The rate on quantized operands is twice this
    /// value.
    pub flops_per_second: f64,
    /// Bytes per second that are read from and written to device memory.
    pub bytes_per_second: f64,
    /// The source of both numbers.
    pub source: &'static str,
}

/// Devices with measured rates: part of the device's name, operations per second, bytes
/// per second, and source.
const KNOWN: [(&str, f64, f64, &str); 1] =
    [("H200", 780e12, 4.3e12, "measured: bf16 GEMMs of 8192^3, and copies; see benches/h200.md")];

impl Rates {
    pub fn new(flops_per_second: f64, bytes_per_second: f64, source: &'static str) -> Self {
        Rates { flops_per_second, bytes_per_second, source }
    }

    /// Returns the measured rates of a device with this name, if any.
    pub fn of(device: &str) -> Option<Self> {
        let known = KNOWN.iter().find(|(part, ..)| device.contains(part));
        known.map(|(_, flops, bytes, source)| Rates::new(*flops, *bytes, source))
    }

    /// Returns the shortest time in seconds that `passes` take one after another. Each pass is
    /// limited by arithmetic or by memory, whichever takes longer.
    pub fn floor_seconds(&self, passes: &[Work]) -> f64 {
        let seconds = passes.iter().map(|work| {
            let computing = (work.flops - work.quantized_flops / 2) as f64 / self.flops_per_second;
            computing.max(work.bytes.0 as f64 / self.bytes_per_second)
        });
        seconds.sum()
    }
}

/// Plans the passes of a measurement.
pub struct Planner {
    /// The model without its weights.
    pub model: Model,
    pub target: Target,
    /// Maximum tokens in a step.
    pub step_tokens: usize,
    /// Maximum patches in one batch of the vision encoder.
    pub launch_patches: usize,
}

/// One sequence in a step.
#[derive(Clone, Copy)]
struct SequenceTokens {
    /// Tokens that were computed in earlier steps.
    cached: usize,
    /// Tokens that this step computes.
    run: usize,
    /// Whether this step samples a token of the sequence.
    chooses: bool,
}

impl Planner {
    /// Plans a step in which `batch` sequences decode. Each has `context` tokens, including
    /// the token being computed.
    pub fn decode(&self, batch: usize, context: usize) -> Result<Vec<Work>, KernelError> {
        let share = SequenceTokens { cached: context - 1, run: 1, chooses: true };
        Ok(vec![self.step(&vec![share; batch])?])
    }

    /// Plans the steps of `count` prompts of `length` tokens. Prompts fill the steps in order.
    pub fn prefill(&self, count: usize, length: usize) -> Result<Vec<Work>, KernelError> {
        let (mut works, mut step, mut left) = (Vec::new(), Vec::new(), self.step_tokens);
        for _ in 0..count {
            let mut cached = 0;
            while cached < length {
                let run = left.min(length - cached);
                step.push(SequenceTokens { cached, run, chooses: cached + run == length });
                (cached, left) = (cached + run, left - run);
                if left == 0 {
                    works.push(self.step(&std::mem::take(&mut step))?);
                    left = self.step_tokens;
                }
            }
        }
        if !step.is_empty() {
            works.push(self.step(&step)?);
        }
        Ok(works)
    }

    /// Plans the encoder batches of `count` pictures of `grid`. Each batch has as
    /// many pictures as fit.
    pub fn encode(&self, count: usize, grid: Grid) -> Result<Vec<Work>, KernelError> {
        let at_once = (self.launch_patches / grid.patches()).clamp(1, count);
        let launch = |pictures| self.work(&Pass::Encode(worst_cases::blank_pictures(&self.model, pictures, grid)));
        let whole = launch(at_once)?;
        let rest = match count % at_once {
            0 => None,
            rest => Some(launch(rest)?),
        };
        Ok(iter::repeat_n(whole, count / at_once).chain(rest).collect())
    }

    fn step(&self, shares: &[SequenceTokens]) -> Result<Work, KernelError> {
        let longest = shares.iter().map(|share| share.run).max().unwrap_or(0);
        let context = shares.iter().map(|share| share.cached + share.run).max().unwrap_or(0);
        // A plan depends only on the number of tokens, not on their values.
        let (tokens, positions) = (vec![0; longest], vec![[0; 3]; longest]);
        let blocks = BlockTable::from(vec![0; context.div_ceil(BLOCK_TOKENS)]);
        let tables = vec![blocks; self.model.cache_groups().count()];
        let has_states = self.model.config().decoder().step_format().has_states;
        let part = |(slot, share): (usize, &SequenceTokens)| SequencePart {
            tokens: &tokens[..share.run],
            unseen: None,
            positions: &positions[..share.run],
            cached_tokens: share.cached,
            tables: &tables,
            pictures: &[],
            logit_rows: usize::from(share.chooses),
            repeated: 0,
            scored: 0..0,
            state: has_states.then(|| StateSlots::in_place(slot as u32)),
        };
        self.work(&Pass::Step(StepBatch::pack(&shares.iter().enumerate().map(part).collect::<Vec<_>>())))
    }

    fn work(&self, pass: &Pass) -> Result<Work, KernelError> {
        worst_cases::work(&self.model, self.target, pass)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bursar_kernels::{CudaTarget, DType};
    use bursar_model::{
        checkpoint::Checkpoint, checkpoint::CheckpointSource, checkpoint::WeightQuantization, registry::shape_settings,
    };

    use super::*;

    fn planner(shape: &str) -> Planner {
        planner_of(shape, (9, 0), None)
    }

    fn planner_of(shape: &str, capability: (u32, u32), quantization: Option<WeightQuantization>) -> Planner {
        let random = shape_settings(shape).expect("a known shape");
        let checkpoint = Checkpoint::open(CheckpointSource::Random(Arc::new(random))).expect("the checkpoint opens");
        let checkpoint = checkpoint.with_quantization(quantization);
        let target = Target::Cuda(CudaTarget { capability, sms: 132, activation: DType::BF16 });
        let model = Model::plan(&checkpoint, &target).expect("the model is planned");
        Planner { model, target, step_tokens: 8192, launch_patches: 3 * 5476 }
    }

    #[track_caller]
    fn assert_near(what: &str, found: f64, expected: f64, within: f64) {
        assert!((found / expected - 1.0).abs() < within, "{what}: {found} is close to {expected}");
    }

    #[test]
    fn the_7b_floors_on_an_h200_match_hand_calculation() {
        let (planner, rates) = (planner("qwen2.5-vl-7b"), Rates::of("NVIDIA H200").expect("the GPU's rates are known"));
        // 7.07e9 weights of two bytes each. The embedding table is not included, because only one
        // of its rows is read.
        let step = rates.floor_seconds(&planner.decode(1, 576).expect("the work is planned"));
        assert_near("a step", step, 7.07e9 * 2.0 / 4.3e12, 0.02);
        // 6.53e9 weights in 28 layers. The last layer multiplies 217e6 of its 233e6 weights only
        // for the prompt's last token.
        let weights = 28.0 * 233.05e6 - 216.53e6;
        // Each token attends to half of its prompt on average, in 28 heads of dimension 128.
        let attention = 28.0 * 4.0 * 256.5 * 3584.0;
        let tokens = 64 * 512;
        let prefill = rates.floor_seconds(&planner.prefill(64, 512).expect("the work is planned"));
        assert_near("tokens a second", tokens as f64 / prefill, 780e12 / (2.0 * weights + attention), 0.005);
        // The tower and the merger have 675e6 weights. A patch uses all weights of the tower and a
        // quarter of the merger's. Four layers have full attention.
        let grid = Grid { t: 1, h: 74, w: 74 };
        let encode = rates.floor_seconds(&planner.encode(1, grid).expect("the work is planned"));
        let (tower, merger) = (32.0 * (4.0 * 1280.0 + 3.0 * 3420.0) * 1280.0, 5120.0 * (5120.0 + 3584.0) / 4.0);
        let flops = 5476.0 * 2.0 * (tower + merger) + 4.0 * 4.0 * 5476.0 * 5476.0 * 1280.0;
        assert_near("a picture", encode, flops / 780e12, 0.03);
    }

    #[test]
    fn fp8_weights_halve_the_floor_if_the_device_multiplies_fp8() {
        let rates = Rates::of("NVIDIA H200").expect("the GPU's rates are known");
        let prefill = |capability, quantization| {
            let planner = planner_of("qwen2.5-vl-7b", capability, quantization);
            rates.floor_seconds(&planner.prefill(64, 512).expect("the work is planned"))
        };
        let attention = 28.0 * 4.0 * 256.5 * 3584.0 * (64.0 * 512.0) / 780e12;
        let plain = prefill((9, 0), None);
        for quantization in [WeightQuantization::Fp8PerBlock, WeightQuantization::Fp8PerChannel] {
            let halved = prefill((9, 0), Some(quantization));
            assert_near("without attention", halved - attention, (plain - attention) / 2.0, 0.01);
            assert_near("computed in 16 bits", prefill((8, 0), Some(quantization)), plain, 0.001);
        }
    }

    #[test]
    fn prompts_are_packed_into_steps_and_pictures_into_launches() {
        let planner = Planner { step_tokens: 64, launch_patches: 32, ..planner("qwen2.5-vl-tiny") };
        let steps = planner.prefill(3, 50).expect("the work is planned");
        assert_eq!(steps.len(), 3, "chunks of 64, 64 and 22 tokens");
        let alone = Planner { step_tokens: 150, ..self::planner("qwen2.5-vl-tiny") };
        let together: u64 = alone.prefill(3, 50).expect("the work is planned").iter().map(|work| work.flops).sum();
        let apart: u64 = steps.iter().map(|work| work.flops).sum();
        assert_eq!(together, apart, "prompts cost the same in one step as in several");
        let launches = planner.encode(5, Grid { t: 1, h: 4, w: 4 }).expect("the work is planned");
        assert_eq!(launches.len(), 3, "launches of two, two and one picture");
        assert!(launches[0] == launches[1] && launches[2].flops < launches[0].flops);
        assert_eq!(planner.encode(2, Grid { t: 1, h: 8, w: 8 }).expect("both pictures are planned").len(), 2);
    }

    #[test]
    fn a_pass_is_bound_by_the_slower_of_compute_and_memory() {
        let rates = Rates::new(10.0, 2.0, "a story");
        let work = |flops, bytes| Work { flops, bytes: bursar::Bytes(bytes), ..Work::default() };
        assert_eq!(rates.floor_seconds(&[work(100, 4), work(10, 6)]), 10.0 + 3.0);
        assert_eq!(rates.floor_seconds(&[Work { quantized_flops: 80, ..work(100, 4) }]), 6.0);
        assert!(Rates::of("host").is_none());
    }
}

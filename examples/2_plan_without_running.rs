//! Plan of the memory that a model needs. The model's code runs on shapes only: no weights are read
//! and nothing is computed.
//!
//! `cargo run --example 2_plan_without_running -- [CHECKPOINT FOLDER]`

use bursar::{Bytes, Envelope, Forecast, Hint, LoadOptions};
use bursar_actors::{engine::Question, profile::MemoryRequirements, profile::MemoryState};
use bursar_kernels::Target;
use bursar_model::{Model, checkpoint::Checkpoint, checkpoint::CheckpointSource, demo};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let source = std::env::args_os().nth(1).map_or_else(demo::checkpoint, |path| CheckpointSource::Folder(path.into()));
    let target = Target::Cpu { threads: 2 };
    let checkpoint = Checkpoint::open(source)?;
    let model = Model::plan(&checkpoint, &target)?;
    for step_tokens in [256, 1024] {
        let envelope = Envelope { step_tokens, picture_patches: 1024, ..Envelope::default() };
        let needs = MemoryRequirements::plan(&model, target, &envelope, Bytes::mib(2))?;
        println!("{step_tokens} tokens a step:\n{}", needs.memory_plan());
        for (worst_case, footprint) in &needs.worst_cases {
            let billions = footprint.work.flops as f64 / 1e9;
            println!("  {}: {} of workspace, {billions:.1} GFLOP", worst_case.name, footprint.workspace);
        }
        println!();
    }
    // A plan depends only on shapes, so planning again gives the same bytes. A server can therefore
    // refuse a model at once.
    let options = LoadOptions { kv_tokens: Some(1 << 24), ..LoadOptions::default() };
    let question = Question {
        model: &model,
        pictures: checkpoint.image_processor.as_ref(),
        checkpoint: Some(&checkpoint),
        target,
        options: &options,
        place: MemoryState::of_available(Bytes::mib(128), Bytes::mib(2)),
    };
    let unfit = Forecast::of(&question)?.unfit.ok_or("16 million tokens cannot fit 128 MiB")?;
    println!("16 million tokens of keys and values on 128 MiB: {unfit}");
    println!("{}", unfit.hint());
    Ok(())
}

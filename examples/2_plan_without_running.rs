//! What would a model take? Its code run on shapes alone: no weight is read, no arithmetic done.
//!
//! `cargo run --example 2_plan_without_running -- [CHECKPOINT FOLDER]`

use bursar::{
    Bytes, Envelope, Hint,
    crates::{
        actors::profile::Needs,
        kernels::Target,
        model::{
            Model,
            checkpoint::{Checkpoint, CheckpointSource},
            demo,
        },
    },
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let source = std::env::args_os().nth(1).map_or_else(demo::checkpoint, |path| CheckpointSource::Folder(path.into()));
    let target = Target::Cpu { threads: 2 };
    let model = Model::plan(&Checkpoint::open(source)?, &target)?;
    for step_tokens in [256, 1024] {
        let envelope = Envelope { step_tokens, picture_patches: 1024, ..Envelope::default() };
        let needs = Needs::plan(&model, target, &envelope, Bytes::mib(2))?;
        println!("{step_tokens} tokens a step:\n{}", needs.memory_plan());
        for (corner, footprint) in &needs.corners {
            let billions = footprint.work.flops as f64 / 1e9;
            println!("  {}: {} of workspace, {billions:.1} GFLOP", corner.name, footprint.workspace);
        }
        println!();
    }
    // A plan depends on shapes alone, so making it again gives every byte again; a server can refuse by it at once.
    let envelope = Envelope { context_tokens: 1 << 20, ..Envelope::default() };
    let needs = Needs::plan(&model, target, &envelope, Bytes::mib(2))?;
    match needs.fits(&model, target, &envelope, Bytes::mib(64)) {
        Ok(()) => Err("contexts of a million tokens cannot fit 64 MiB".into()),
        Err(error) => {
            println!("a context of a million tokens on 64 MiB: {error}");
            println!("{}", error.hint().unwrap_or_default());
            Ok(())
        }
    }
}

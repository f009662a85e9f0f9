//! `bursar plan`: the memory that a model takes on a device and what it can serve there, without a
//! GPU and without the model's weights.

mod device_spec;
mod gpu;
mod report;
mod shapes;
mod unquantized;

use std::process::ExitCode;

use bursar::{Bytes, CheckpointError, Hint, LoadOptions, ModelSource, StartError};
use bursar_actors::{
    engine::Forecast, engine::PlacementQuery, engine::Question, engine::RanksShortfall, engine::RanksTried,
    runtime::open_settings,
};
use bursar_kernels::{BLOCK_TOKENS, Target};
use bursar_model::{
    LoadError, Model, checkpoint::Checkpoint, checkpoint::CheckpointSource, checkpoint::WeightFormats,
    weights::BlockWeights,
};
use clap::Args;
use serde_json::json;
use tokio::task::JoinError;

use self::{
    device_spec::DeviceSpec, device_spec::Planned, gpu::Gpu, report::Report, shapes::Shapes, unquantized::Unquantized,
};
use crate::{
    DeviceOptions,
    device::RANKS_MAX,
    failure::{self, Failure},
    knobs::KnobOptions,
    model, shared_output,
};

/// Options of `bursar plan`.
#[derive(Args)]
pub struct Options {
    /// A Hugging Face checkpoint folder, a GGUF file, a model of the hub, or `demo`.
    #[arg(long, default_value = "demo", conflicts_with = "shape")]
    model: String,
    /// Shape of a released model, used in place of a checkpoint.
    #[arg(long, value_name = "NAME")]
    shape: Option<String>,
    /// Lists the shapes, with the memory that each takes and the load that it can serve on GPUs
    /// with 24, 48, 80 and 141 GB under the given knobs.
    #[arg(long, conflicts_with_all = ["model", "shape", "total", "gpu"])]
    shapes: bool,
    /// Memory of the device to plan for, such as 80GiB, instead of the memory that the device has.
    #[arg(long, value_name = "BYTES")]
    total: Option<Bytes>,
    /// GPU to plan for, which need not be in this machine: a product such as h200, or sm_NN, or
    /// sm_NN:PROCESSORS. By default, the GPU of this machine. Without a GPU, the demo model is
    /// planned for the host and any other model for an H200.
    #[arg(long, value_name = "GPU")]
    gpu: Option<Gpu>,
    /// Prints one JSON object instead of text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    knobs: KnobOptions,
}

/// Exit code if the model does not fit, distinct from the code for a plan that cannot be made.
const DOES_NOT_FIT: u8 = 1;
const CANNOT_BE_PLANNED: u8 = 2;

/// Runs the command. Exits with 0 if the model fits, 1 if it does not, and 2 if the plan cannot be
/// made.
pub async fn run(device: &DeviceOptions, options: Options) -> ExitCode {
    if options.shapes {
        return list(device, options).await;
    }
    let (device, is_json) = (device.clone(), options.json);
    let planned = tokio::task::spawn_blocking(move || plan(&device, &options)).await;
    let planned = planned.unwrap_or_else(|died| Err(death(&died)));
    match planned {
        Ok(ref report) if is_json => println!("{}", json!(report)),
        Ok(ref report) => print!("{report}"),
        Err(ref failure) if is_json => println!("{}", shared_output::failure(failure)),
        Err(ref failure) => failure::print(failure),
    }
    match planned {
        Ok(report) if report.fits => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(DOES_NOT_FIT),
        Err(_) => ExitCode::from(CANNOT_BE_PLANNED),
    }
}

/// Lists all shapes. Exits with 0, or with 2 if they cannot be planned.
async fn list(device: &DeviceOptions, options: Options) -> ExitCode {
    let (device, is_json) = (device.clone(), options.json);
    let ranks = if device.is_any_number() { 1 } else { device.ranks() };
    let list = move || Shapes::of(&options.knobs.options(device.blas())?, ranks, options.knobs.canary()?);
    let listed = tokio::task::spawn_blocking(list).await;
    match listed.unwrap_or_else(|died| Err(death(&died))) {
        Ok(shapes) if is_json => println!("{}", json!(shapes)),
        Ok(shapes) => print!("{shapes}"),
        Err(failure) => {
            if is_json {
                println!("{}", shared_output::failure(&failure))
            } else {
                failure::print(&failure)
            }
            return ExitCode::from(CANNOT_BE_PLANNED);
        }
    }
    ExitCode::SUCCESS
}

fn death(died: &JoinError) -> Failure {
    Failure {
        error: format!("the planning task failed: {died}"),
        hint: "this is a bug in Bursar; please report it with the model".to_owned(),
    }
}

fn plan(device: &DeviceOptions, options: &Options) -> Result<Report, Failure> {
    let load = options.knobs.options(device.blas())?;
    let source = options.source()?;
    let planned = Planned::of(&DeviceSpec {
        choice: device.choice()?,
        gpu: options.gpu.as_ref(),
        total: options.total,
        canary: options.knobs.canary()?,
        threads: load.threads,
        is_small: options.is_demo(),
        is_any_number: device.is_any_number(),
    })?;
    let files = source.origin().clone().fetch_settings()?;
    let target = load.dtype.on(planned.target, files.stored_type()?).map_err(StartError::from)?;
    let mut notes: Vec<_> = options.knobs.knobs()?.notes().into_iter().map(str::to_owned).collect();
    notes.extend(
        files.skipped_encoders().iter().map(|error| format!("pictures are not accepted: {error} ({})", error.hint())),
    );
    let checkpoint = open(files, &load, &mut notes)?.with_quantization(load.quantization);
    let checkpoint = load.apply_on(&target, checkpoint).map_err(StartError::from)?;
    let pictures = checkpoint.image_processor.as_ref();
    let name = load.name.clone().unwrap_or_else(|| source.name());
    let sought = PlacementQuery { name: &name, checkpoint: &checkpoint, options: &load };
    let ranks =
        if device.is_any_number() { min_ranks_for(&sought, &planned, target, &mut notes)? } else { device.ranks() };
    let (whole, target, place) = (target, target.of_ranks(ranks), planned.place_of(ranks));
    let model = &Model::plan_heaviest(&checkpoint, &target, ranks)?;
    model.config().check_vocabulary(checkpoint.prompts()?.tokenizer())?;
    let question = Question { model, pictures, checkpoint: Some(&checkpoint), target, options: &load, place };
    let forecast = Forecast::of(&question)?;
    if !forecast.fits() && !device.is_any_number() {
        let more = |ranks: &usize| {
            matches!(sought.shortfall(*ranks, whole.of_ranks(*ranks), planned.place_of(*ranks)), Ok(None))
        };
        let enough = (ranks + 1..=RANKS_MAX as usize).find(more);
        notes.extend(
            enough.map(|ranks| {
                format!("it fits if {ranks} such devices share the model: --tensor-parallel-size {ranks}")
            }),
        );
    }
    match checkpoint.weight_formats().map_err(LoadError::from)? {
        WeightFormats::Stored(stored) => {
            notes.push(format!("the checkpoint's weights are {} ({})", stored.scheme, stored.method.name()));
        }
        WeightFormats::Packed(packed) => {
            let counted = match model.int4_bytes() {
                Bytes::ZERO => "this plan counts them after dequantization".to_owned(),
                bytes => format!("{bytes} of them stay packed"),
            };
            let (scheme, method) = (packed.scheme, packed.method.name());
            notes.push(format!("the checkpoint's weights are {scheme} ({method}); {counted}"));
        }
        WeightFormats::Unquantized | WeightFormats::Requested(_) => {}
    }
    notes.extend(model.block_weights().map(block_note));
    notes.extend(draft_note(model, &target));
    let unquantized = Unquantized::of(checkpoint, ranks, target, &load, place)?;
    notes.extend(unquantized.as_ref().and_then(|plain| plain.note(model, &target, &forecast)));
    let planned = Planned { target, places: vec![place], ..planned };
    Ok(Report::of(&name, &planned, model, &forecast, unquantized, notes))
}

/// Reports the memory of a draft head, if the model has one. This memory is part of the plan's weights
/// and KV cache.
fn draft_note(model: &Model, target: &Target) -> Option<String> {
    let of_token = Bytes(model.kv_shape(target).block_bytes().0 / BLOCK_TOKENS as u64);
    let bytes = model.draft_bytes();
    (bytes > Bytes::ZERO)
        .then(|| format!("the draft head accounts for {bytes} of the weights and {of_token} of each token's KV cache"))
}

/// Reports how many bytes of a GGUF file stay in quantized blocks, and which tensors do not.
fn block_note(found: &BlockWeights) -> String {
    const SHOWN: usize = 3;
    let BlockWeights { bytes, widened } = found;
    let stay = format!("{bytes} of the weights stay in the file's quantized blocks");
    match widened.len() {
        0 => stay,
        count => {
            let more = if count > SHOWN { ", ..." } else { "" };
            let shown = widened[..count.min(SHOWN)].join(", ");
            format!("{stay}; {count} tensors are widened while they load: {shown}{more}")
        }
    }
}

/// Returns the smallest number of devices that the model fits on, among the devices found. If none
/// of these numbers is enough, returns the largest number of devices that can share the model.
fn min_ranks_for(
    sought: &PlacementQuery<'_>,
    planned: &Planned,
    target: Target,
    notes: &mut Vec<String>,
) -> Result<usize, Failure> {
    let on = |ranks| (ranks <= planned.found).then(|| (target.of_ranks(ranks), planned.place_of(ranks)));
    match sought.min_ranks(|ranks| Ok(on(ranks))) {
        Ok(min_ranks) => {
            notes.push(min_ranks.to_string());
            Ok(min_ranks.ranks)
        }
        Err(StartError::NoRanksFit(error)) => {
            notes.push(error.to_string());
            let can_share = |tried: &&RanksTried| matches!(tried.shortfall, RanksShortfall::OnEach(_));
            Ok(error.tried.iter().rfind(can_share).map_or(1, |tried| tried.ranks))
        }
        Err(error) => Err(error.into()),
    }
}

/// Opens the checkpoint, or only its `config.json` if there are no weights.
fn open(files: CheckpointSource, load: &LoadOptions, notes: &mut Vec<String>) -> Result<Checkpoint, Failure> {
    let (checkpoint, missing) = open_settings(files, load)?;
    notes.extend(missing.map(|name| format!("{name} lacks weights, so their sizes are taken from config.json")));
    Ok(checkpoint)
}

impl Options {
    fn source(&self) -> Result<ModelSource, Failure> {
        match &self.shape {
            None => Ok(model::source(&self.model)),
            Some(shape) => model::shape(shape, 0, None),
        }
    }

    fn is_demo(&self) -> bool {
        self.shape.is_none() && self.model == "demo"
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        Failure::of(&error)
    }
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Self {
        Failure::of(&error)
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        Failure::of(&error)
    }
}

impl From<bursar::DeviceError> for Failure {
    fn from(error: bursar::DeviceError) -> Self {
        let hint = error.hint().unwrap_or_else(|| "check the message of the driver".to_owned());
        Failure { hint, error: error.to_string() }
    }
}

//! Bursar serves vision-language models inside your own process and never runs the device out of
//! memory.
//!
//! One budget actor issues a lease for every byte of device memory. Concurrency never exceeds what
//! was measured under stress. A supervisor restarts any actor that dies, and a request sees only a
//! pause.
//!
//! ```
//! use bursar::{Chat, Class, Image, LoadOptions, MIB, ModelSource, Runtime, RuntimeConfig, demo};
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let runtime = Runtime::start(RuntimeConfig::default()).await?; // a GPU, or host memory of 512 MiB
//! let options = LoadOptions { memory_fraction: Some(0.5), ..LoadOptions::small() }; // leaves memory for others
//! let model = runtime.load_with(ModelSource::demo(), options, |_| {}).await?; // plan, load, stress, READY
//!
//! let picture = Image::from_bytes(demo::pictures()[1].bytes); // or Image::open("cat.jpg")?
//! let mut reply = model.chat(Chat::new().user("What number is written?").image(picture)).await?;
//! # let mut received = String::new();
//! while let Some(event) = reply.next().await {
//! #   let event = event?; received += event.text(); let event: Result<_, bursar::ChatError> = Ok(event);
//!     print!("{}", event?.text());
//! }
//! # assert_eq!(received, "427");
//!
//! println!("{}", runtime.budget().snapshot().await?); // every byte, by class and model
//! let lease = runtime.budget().lease(Class::external("my-index"), 64 * MIB).await?; // for your own code
//! # drop(lease);
//! # runtime.shutdown().await;
//! # Ok(())
//! # }
//! ```
//!
//! [`Runtime`] owns one device, its ledger and its models. [`LoadOptions`] sets how large inputs
//! may be and how much memory a model takes. [`ModelHandle`] answers a [`Chat`] with a [`Reply`],
//! renders a chat's [`Prompt`] without generating, and returns the model's [`ModelFacts`].
//! [`Budget`] leases memory to your own code, which turns a lease into a [`Segment`]. Sizes are
//! [`Bytes`]. Text is counted in the model's tokens and pictures in patches (14 x 14 pixels in
//! Qwen2.5-VL). Handles are `Clone + Send + 'static`. Everything needs a multi-threaded tokio
//! runtime. In a debug build, set `[profile.dev.package."*"] opt-level = 2`: without this setting,
//! a CPU takes minutes to reach READY.
//!
//! Errors are enums. Each error names the limit and the value, and its [`Hint`] says what to
//! change.
//!
//! # Your own actors
//!
//! Everything runs on [`ractor`], which this crate re-exports so that your code and Bursar use the
//! same version. [`ModelHandle::serving`] returns references to the actors that serve a model now,
//! [`Runtime::supervised`] returns the actors that supervise them, and [`messages`] lists the
//! messages that you may send to them.
//!
//! An actor has one supervisor, and Bursar's supervisors restart Bursar's actors. Link *your* actor
//! under one of Bursar's (`mine.link(theirs)`) so that your actor ends when Bursar's does, or
//! monitor Bursar's actor (`mine.monitor(theirs)`) to be notified when it dies. Do not link one of
//! Bursar's actors under yours: the link would remove that actor from the supervisor that restarts
//! it. [`Runtime::start_linked`] puts a whole runtime under your own supervisor. A
//! [`FaultInjection`] makes any of Bursar's actors die, so that you can test how your actors react.
//!
//! # Other crates
//!
//! This crate is the public API. It is built on `bursar-budgets` (ledger, leases, segments,
//! workspaces), `bursar-kernels` (operations), `bursar-model` (checkpoints, pictures, text) and
//! `bursar-actors`. For an item that this crate does not re-export, depend on one of these crates
//! directly, in the same version.
//!
//! `bursar-serve` adds OpenAI's and Anthropic's APIs over HTTP. `bursar-cli` is the program.

#![deny(missing_docs)]
#![warn(clippy::match_bool)]

pub use bursar_actors::metric;
pub use bursar_actors::{
    budget::{Budget, LeaseError, WatchOptions},
    chat::{
        BlockEvents, Chat, ChatError, ChatEvent, Content, Deadline, Deadlines, ErrorKind, FinishReason, Image, KvWatch,
        ModelFacts, ModelHandle, Prompt, Reply, ScoredToken, StopReason, TokenScore, ToolCall, ToolCallEvent,
        ToolChoice, ToolError, Usage, Video,
    },
    compute::lane::LaneError,
    engine::{
        Change, Forecast, KvCacheType, KvCacheTypeError, Limits, LoadOptions, MinRanks, NoRanksFit, Precision,
        PrecisionError, Progress, RanksShortfall, RanksTried, Serving, Shortfall, StartError, Suggestion, Unfit,
    },
    event::{Event, Events, Leased, Missed, Recorded},
    knobs::{self, DraftQuantization, StateType},
    kv::{BlockEvent, KvUse, StoredBlock},
    profile::{
        AttemptReport, Difference, Evidence, FaultPlan, FaultPlanError, KvChoice, Notice, Outcome, Phase, ProfileError,
        ProfileRecord, UnknownPhase,
    },
    ractor,
    responder::AskError,
    runtime::{
        DeviceChoice, Health, MakeDevice, MinDevicesFor, ModelHealth, ModelSource, Placement, PlacementRequest,
        Runtime, RuntimeConfig, RuntimeError, Supervised,
    },
    scheduler::{DraftSource, NgramSizes},
    sleep::{NotWoken, SleepError, SleepLevel},
    supervise::{FaultInjection, InjectedFault, Intensity},
    tenant::{Tenant, TenantWeights},
    token_interval::{MeasuredCosts, MeasuredLaunch, MeasuredStep, StepWork},
    vision::{PicturesTooLarge, VisionError},
};
#[cfg(feature = "prometheus")]
pub use bursar_actors::{
    metric::{MetricsAddress, NoAddress},
    runtime::{MetricsServer, MetricsText, ServeMetricsError},
};
pub use bursar_budgets::{
    Address, Bytes, Claim, Class, ClassLine, CudaDevice, Device, DeviceError, DeviceGroup, DeviceMemory, DoesNotFit,
    Fence, Frame, GIB, Gate, GateLine, GpuLine, Hint, Holding, HostConfig, HostCopy, HostDevice, HostMemory, KIB, Knob,
    Label, Lease, LeaseId, LeaseLine, LeaseMeter, LeaseState, MIB, Memory, MemoryPlan, Overhead, Overloaded, Owner,
    Pages, ParseBytesError, Priority, Refusal, Resized, RevokeHandle, Segment, Snapshot, Temporary, Timeline,
    WaitingLine, Workspace, WorkspaceFull,
};
pub use bursar_kernels::{BLOCK_TOKENS, BlasSearch, KernelError, OpenError, Target, keep_multicast_off};
#[cfg(feature = "hub")]
pub use bursar_model::checkpoint::{FetchWatch, HubError, HubModel, HubOptions};
pub use bursar_model::{
    Depth, Envelope, LimitError, LoadError,
    blocks::ConfigError,
    checkpoint::{
        CheckpointOrigin, CheckpointSource, EmbeddedFile, QuantizationError, RandomCheckpoint, WeightQuantization,
    },
    demo,
    error::{
        CheckpointError, GrammarError, ImageError, MediaError, ProcessorError, SamplingError, TextError, VideoError,
    },
    flow::{ContentSpan, ImageLimits, LayoutError, PictureHash, PrefixKey},
    processor::FrameSampling,
    registry::{UnknownArchitecture, UnknownShape, random_checkpoint},
    sampling::{JsonWhitespace, OutputFormat},
    text::{ContinueError, ReasoningFormat, ReplyFormat, Role, ToolFormat},
    weights::WeightError,
};

/// Messages that your own actors may send to Bursar's actors.
///
/// Most messages are internal. An actor treats a message that its peers would never send as a bug:
/// the actor fails and is restarted. [`SchedulerMessage::KvUse`](messages::SchedulerMessage::KvUse)
/// is always safe to send, and so are the messages that [`Budget`] and [`Runtime`] send on your
/// behalf.
///
/// ```
/// # use bursar::{ModelSource, Runtime, RuntimeConfig};
/// use bursar::messages::{Responder, SchedulerMessage};
/// # #[tokio::main(flavor = "multi_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let runtime = Runtime::start(RuntimeConfig::default()).await?;
/// # let model = runtime.load_with(ModelSource::demo(), bursar::LoadOptions::small(), |_| {}).await?;
/// let (responder, answer) = Responder::new();
/// model.serving().await?.scheduler.send_message(SchedulerMessage::KvUse(responder))?;
/// let blocks = answer.await?; // of 16 tokens each, over all layers
/// assert_eq!(blocks.held, 0, "the model is idle");
/// # runtime.shutdown().await;
/// # Ok(())
/// # }
/// ```
pub mod messages {
    pub use bursar_actors::{
        budget::BudgetMessage,
        engine::EngineMessage,
        kv::KvUse,
        responder::{AskError, Responder},
        runtime::RuntimeMessage,
        scheduler::SchedulerMessage,
        vision::VisionMessage,
    };
}

/// Pages whose snippets are compiled and run as tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    struct Readme;

    #[doc = include_str!("../docs/embedding.md")]
    struct Embedding;
}

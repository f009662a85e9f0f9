//! Bursar serves vision-language models inside your own process and never runs the device out of memory.
//!
//! Every byte of device memory belongs to a lease that one budget actor issued; concurrency is bounded by what was
//! measured under stress; a supervisor restarts what dies, and a request sees a pause.
//!
//! ```no_run
//! use bursar::{Chat, Class, Image, LoadOptions, MIB, ModelSource, Runtime, RuntimeConfig};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let runtime = Runtime::start(RuntimeConfig::default()).await?; // host memory of 512 MiB
//! let options = LoadOptions { memory_fraction: 0.5, ..LoadOptions::default() }; // leaves room for others
//! let model = runtime.load_with(ModelSource::demo(), options, |_| {}).await?; // plan, load, stress, READY
//! let chat = Chat::new().user("What is in this picture?").image(Image::open("shapes.png")?);
//! let mut reply = model.chat(chat).await?;
//! while let Some(event) = reply.next().await {
//!     print!("{}", event?.text());
//! }
//! println!("{}", runtime.budget().snapshot().await?); // every byte, by class and model
//! let lease = runtime.budget().lease(Class::tenant("my-index"), 64 * MIB).await?; // for your own code
//! # Ok(())
//! # }
//! ```
//!
//! The crates below are public too: `bursar-budgets` (ledger, leases, segments, workspaces), `bursar-kernels`
//! (operations), `bursar-model` (checkpoints, pictures, text) and `bursar-actors`.

#![deny(missing_docs)]

pub use bursar_actors::{
    budget::{Budget, LeaseError},
    chat::{
        Chat, ChatError, ChatEvent, Content, FinishReason, Image, ModelHandle, Reply, ScoredToken, TokenScore, Usage,
        Video,
    },
    engine::{LoadOptions, Progress, StartError},
    ractor,
    runtime::{DeviceChoice, ModelSource, Runtime, RuntimeConfig, RuntimeError},
    supervise::{Drill, Intensity},
};
pub use bursar_budgets::{Bytes, Class, Device, GIB, HostConfig, HostDevice, KIB, Lease, MIB, Script, Snapshot};
#[cfg(feature = "hub")]
pub use bursar_model::checkpoint::{HubError, HubModel, HubOptions};
pub use bursar_model::{
    Envelope, demo,
    error::{ImageError, VideoError},
    flow::ImageLimits,
    sampling::OutputFormat,
    text::Role,
};

/// The crates that this one is a facade of.
pub mod crates {
    pub use bursar_actors as actors;
    pub use bursar_budgets as budgets;
    pub use bursar_kernels as kernels;
    pub use bursar_model as model;
}

//! The runtime: its device, budget and engines, and its public handle.

mod actor;
mod core;
mod device;
mod device_search;
mod handle;
mod health;
mod message;
#[cfg(feature = "prometheus")]
mod metrics_server;
mod model_source;
mod placing;
mod published;
#[cfg(feature = "prometheus")]
mod recorder;
#[cfg(feature = "prometheus")]
mod scrape_limit;
mod unwinding;

pub use crate::losses::Losses;
pub use actor::{RuntimeActor, RuntimeArguments};
pub use device::{DeviceChoice, MakeDevice, MinDevicesFor};
pub use device_search::{gpus, most_free_first, open_settings};
pub use handle::{Runtime, RuntimeConfig, RuntimeError};
pub use health::{Health, ModelHealth};
pub use message::{LoadRequest, OnReleased, RuntimeMessage, Supervised};
#[cfg(feature = "prometheus")]
pub use metrics_server::MetricsServer;
pub use model_source::ModelSource;
pub use placing::{Placement, PlacementRequest};
pub use published::Shown;
#[cfg(feature = "prometheus")]
pub use recorder::{MetricsText, ServeMetricsError};

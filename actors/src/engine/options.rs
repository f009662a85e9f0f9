//! What a user can choose about one model.

use bursar_model::{Envelope, flow::ImageLimits};

use crate::supervise::Intensity;

/// How a model is loaded. The default fits a small model on a small device.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The model's name in tables and metrics; by default that of its source.
    pub name: Option<String>,
    /// The largest inputs that may reach the device. The model's own limits lower it.
    pub envelope: Envelope,
    /// What a picture may be before it is decoded.
    pub image_limits: ImageLimits,
    /// The share of what is left after everything else that keys and values take, above 0 and up to 1.
    pub memory_fraction: f64,
    /// A size of the cache of keys and values in tokens, instead of the share.
    pub kv_tokens: Option<usize>,
    /// Requests that may be under way or wait; one more is refused with `Overloaded`.
    pub requests: usize,
    /// Threads that compute on the host device, and that decode pictures.
    pub threads: usize,
    /// When restarts of its vision, kv and scheduler become a crash loop.
    pub intensity: Intensity,
    /// When restarts of its engine, which stress anew, become one.
    pub engine_intensity: Intensity,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            name: None,
            envelope: Envelope::default(),
            image_limits: ImageLimits::default(),
            memory_fraction: 0.9,
            kv_tokens: None,
            requests: 128,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            intensity: Intensity::SERVING,
            engine_intensity: Intensity::ENGINE,
        }
    }
}

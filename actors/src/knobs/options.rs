//! What a user can choose about one model.

use std::path::PathBuf;

use bursar_budgets::Bytes;
use bursar_kernels::BlasSearch;
use bursar_model::{Envelope, flow::ImageLimits};

use super::{Limits, Names, Precision};
use crate::{
    profile::{FaultPlan, KvChoice},
    supervise::Intensity,
};

/// How a model is loaded. The default fits a small model on a host device, and what people expect of a GPU on one.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The model's name in tables and metrics, by which it is unloaded; by default that of its source. One that is taken
    /// gets a number behind it.
    pub name: Option<String>,
    /// The largest inputs that may reach the device. The model's own limits lower it. By default
    /// [`Envelope::default`] on a host device, which computes on the CPU, and [`Envelope::gpu`] on a GPU, whose launches
    /// then follow the largest picture.
    pub envelope: Option<Envelope>,
    /// Single limits over that.
    pub limits: Limits,
    /// By which names they were said, for errors and suggestions ([`Knobs::named_from`](crate::knobs::Knobs::named_from)).
    pub names: Names,
    /// What a picture may be before it is decoded.
    pub image_limits: ImageLimits,
    /// The share of what is left after everything else that keys and values take, above 0 and up to 1. By default 0.9 on a
    /// host device, and on a GPU all but a small reserve ([`Share::expected_of`](crate::profile::Share::expected_of)):
    /// whoever wants to lease memory of a GPU beside a model, or to load a second one, says a fraction.
    pub memory_fraction: Option<f64>,
    /// A size of the cache of keys and values in tokens (whole blocks of 16), instead of the share. It has no fewer than
    /// the profile needs to run the largest inputs: as many as all sequences can have, up to 8,192 and a block each.
    pub kv_tokens: Option<usize>,
    /// A share of the whole device for everything of ours, weights and workspaces and overhead too, above 0 and up to 1;
    /// instead of `memory_fraction`. What others hold is not counted, so a busy device may give less than that.
    pub device_fraction: Option<f64>,
    /// A size of the cache in bytes, instead of `kv_tokens`: whole pages of each layer are taken of it.
    pub kv_bytes: Option<Bytes>,
    /// The type of weights, activations, keys and values. One that the device does not compute in is refused.
    pub dtype: Precision,
    /// Requests that may be under way or wait; one more is refused with `Overloaded`.
    pub requests: usize,
    /// Threads that compute on the host device, and as many again that decode pictures; by default one a CPU.
    pub threads: usize,
    /// A folder where the profiles of starts are written down, one file a model and device: a later start on the same
    /// basis runs its worst cases once, at the size that was found, and not twice. None by default: then every start
    /// measures anew, and nothing is written. It is made when it is not there, and several processes may share it.
    pub profiles: Option<PathBuf>,
    /// Measures anew also where a profile is written down that applies, and writes what it finds in its place.
    pub measures_anew: bool,
    /// Worst cases run through all layers, before keys and values are sized and again at their size. By default a GPU runs
    /// some layers before and all of them at the final size, and a host device, at that size alone, as many layers as reach
    /// the planned peaks to the byte: minutes of arithmetic less.
    pub full_stress: bool,
    /// Where cuBLASLt is looked for on a GPU.
    pub blas: BlasSearch,
    /// When restarts of its vision, kv and scheduler become a crash loop.
    pub intensity: Intensity,
    /// When restarts of its engine, which stress anew, become one.
    pub engine_intensity: Intensity,
    /// Memory that is refused on purpose, to see what happens then; none by default. A host device refuses in every
    /// phase; a GPU where a lane is asked (capture, validate, serve).
    pub faults: FaultPlan,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            name: None,
            envelope: None,
            limits: Limits::default(),
            names: Names::default(),
            image_limits: ImageLimits::default(),
            memory_fraction: None,
            kv_tokens: None,
            device_fraction: None,
            kv_bytes: None,
            dtype: Precision::Auto,
            requests: 128,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            profiles: None,
            measures_anew: false,
            full_stress: false,
            blas: BlasSearch::usual(),
            intensity: Intensity::SERVING,
            engine_intensity: Intensity::ENGINE,
            faults: FaultPlan::none(),
        }
    }
}

impl LoadOptions {
    /// Limits that are stressed in a moment, for tests, examples and small programs: contexts of 512 tokens, 4 sequences
    /// at once, two pictures of 448 x 448 pixels a request, 16 requests under way.
    pub fn small() -> Self {
        LoadOptions { envelope: Some(Envelope::small()), requests: 16, ..LoadOptions::default() }
    }

    /// What is said of the size of keys and values.
    pub fn kv(&self) -> KvChoice {
        let LoadOptions { memory_fraction, device_fraction, kv_tokens, kv_bytes, .. } = *self;
        KvChoice { memory_fraction, device_fraction, kv_tokens, kv_bytes }
    }

    /// The largest inputs by default on a GPU, or where host memory stands in for one.
    pub fn envelope_for(is_host: bool) -> Envelope {
        match is_host {
            true => Envelope::default(),
            false => Envelope::gpu(),
        }
    }
}

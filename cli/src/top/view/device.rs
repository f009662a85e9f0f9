//! The memory of a device, by the purpose of every byte.

use std::collections::BTreeMap;

use bursar::Bytes;
use serde::Serialize;

use super::window::{Count, ScrapeWindow, counts};
use crate::top::samples::Samples;

/// A part of the bar. Parts are declared in the bar's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryPart {
    /// Memory of this process outside leases.
    Overhead,
    /// Memory of other processes.
    Foreign,
    Weights,
    /// KV cache blocks in use by sequences.
    KvUsed,
    /// Unused KV cache blocks whose content can be reused.
    KvCached,
    KvFree,
    /// Recurrent states of sequences, and their snapshots.
    States,
    StepWorkspace,
    /// Temporaries of the vision encoder.
    VisionWorkspace,
    VisionCache,
    /// Driver memory for captured CUDA graphs.
    Graphs,
    /// Leases of users' own code.
    Tenants,
    /// Leases of a class that this version does not know.
    Other,
    /// Bytes kept unused on purpose.
    Canary,
    Free,
}

impl MemoryPart {
    /// All parts, in the bar's order.
    pub const ALL: [MemoryPart; 15] = [
        MemoryPart::Overhead,
        MemoryPart::Foreign,
        MemoryPart::Weights,
        MemoryPart::KvUsed,
        MemoryPart::KvCached,
        MemoryPart::KvFree,
        MemoryPart::States,
        MemoryPart::StepWorkspace,
        MemoryPart::VisionWorkspace,
        MemoryPart::VisionCache,
        MemoryPart::Graphs,
        MemoryPart::Tenants,
        MemoryPart::Other,
        MemoryPart::Canary,
        MemoryPart::Free,
    ];

    pub fn name(self) -> &'static str {
        match self {
            MemoryPart::Overhead => "overhead",
            MemoryPart::Foreign => "foreign",
            MemoryPart::Weights => "weights",
            MemoryPart::KvUsed => "kv used",
            MemoryPart::KvCached => "kv cached",
            MemoryPart::KvFree => "kv free",
            MemoryPart::States => "states",
            MemoryPart::StepWorkspace => "step workspace",
            MemoryPart::VisionWorkspace => "vision workspace",
            MemoryPart::VisionCache => "vision cache",
            MemoryPart::Graphs => "graphs",
            MemoryPart::Tenants => "tenants",
            MemoryPart::Other => "other leases",
            MemoryPart::Canary => "canary",
            MemoryPart::Free => "free",
        }
    }

    /// Returns the part of a lease class. `None` if other metrics cover the class, or if it
    /// is not device memory.
    fn of_class(class: &str) -> Option<MemoryPart> {
        match class {
            "host" | "host_kv" | "canary" => None,
            "weights" => Some(MemoryPart::Weights),
            "kv" => Some(MemoryPart::KvFree),
            "states" => Some(MemoryPart::States),
            "step_workspace" => Some(MemoryPart::StepWorkspace),
            "vision_workspace" => Some(MemoryPart::VisionWorkspace),
            "vision_cache" => Some(MemoryPart::VisionCache),
            "graphs" => Some(MemoryPart::Graphs),
            "tenant" => Some(MemoryPart::Tenants),
            _ => Some(MemoryPart::Other),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Piece {
    pub part: MemoryPart,
    pub bytes: Bytes,
}

/// The leases of one class and model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeaseView {
    /// The model's name. Empty for leases of users' own code.
    pub model: String,
    pub class: String,
    pub bytes: Bytes,
    /// Backed bytes, if reported. A lease without segments counts in full.
    pub used: Option<Bytes>,
    /// The highest number of leased bytes so far.
    pub peak: Option<Bytes>,
}

/// One GPU of a group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuView {
    /// Name within the group, such as `cuda:1`.
    pub name: String,
    /// All memory of the GPU, in the bar's order, without zeros.
    pub pieces: Vec<Piece>,
    /// Memory of this process that was allocated outside leases after READY. Must be 0.
    pub drift: Bytes,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceView {
    /// Name as in --device: `host`, `cuda:0`.
    pub name: String,
    pub total: Bytes,
    pub driver_free: Option<Bytes>,
    /// All memory of the device, in the bar's order, without zeros. The sum exceeds `total` if the
    /// device is short of memory.
    pub pieces: Vec<Piece>,
    /// The GPUs of a group. Empty for a single device.
    pub cards: Vec<GpuView>,
    /// All leases of device and host memory, the largest first.
    pub leases: Vec<LeaseView>,
    /// Memory of this process that was allocated outside leases after READY. Must be 0.
    pub drift: Bytes,
    /// Bytes that models were asked to release and still hold.
    pub owed: Bytes,
    /// Bytes by which grants and other uses exceed the total.
    pub deficit: Bytes,
    pub canary: Bytes,
    pub canary_wanted: Bytes,
    /// Number of times that the canary was given up.
    pub canary_given: u64,
    /// Number of times that the device was lost.
    pub losses: u64,
    pub waiting: u64,
    /// Refused leases, by reason.
    pub refused: Vec<Count>,
    /// Leased host memory, and its limit.
    pub host: Option<(Bytes, Bytes)>,
}

impl DeviceView {
    /// Returns all devices, sorted by name.
    pub(super) fn all(look: ScrapeWindow<'_>) -> Vec<Self> {
        const NAMES: [&str; 2] = ["bursar_device_total_bytes", "bursar_lease_bytes"];
        look.now.values_of(&NAMES, "device").into_iter().map(|name| DeviceView::of(look.now, name)).collect()
    }

    fn of(now: &Samples, name: String) -> Self {
        let bytes = |metric: &str| now.bytes(metric, &[("device", &name)]);
        let held = |metric: &str| bytes(metric).unwrap_or_default();
        let count = |metric: &str| now.count(metric, &[("device", &name)]).unwrap_or(0);
        let mut refused: BTreeMap<String, u64> = BTreeMap::new();
        for Count { of, count } in counts(now, "bursar_leases_refused_total", &[("device", &name)], "reason") {
            let of_reason = refused.entry(of).or_default();
            *of_reason = of_reason.saturating_add(count);
        }
        DeviceView {
            total: held("bursar_device_total_bytes"),
            driver_free: bytes("bursar_device_free_bytes"),
            pieces: pieces(now, &name, |what| bytes(whole(what)).unwrap_or_default()),
            cards: cards(now, &name),
            leases: leases(now, &name),
            drift: held("bursar_drift_bytes"),
            owed: held("bursar_owed_bytes"),
            deficit: held("bursar_deficit_bytes"),
            canary: held("bursar_canary_bytes"),
            canary_wanted: held("bursar_canary_wanted_bytes"),
            canary_given: count("bursar_canary_given_total"),
            losses: count("bursar_device_losses_total"),
            waiting: count("bursar_leases_waiting"),
            refused: refused.into_iter().map(|(of, count)| Count { of, count }).collect(),
            host: bytes("bursar_host_leased_bytes").zip(bytes("bursar_host_total_bytes")),
            name,
        }
    }

    pub fn free(&self) -> Bytes {
        free(&self.pieces)
    }
}

impl GpuView {
    pub fn free(&self) -> Bytes {
        free(&self.pieces)
    }
}

fn free(pieces: &[Piece]) -> Bytes {
    pieces.iter().find(|piece| piece.part == MemoryPart::Free).map_or(Bytes::ZERO, |piece| piece.bytes)
}

/// Returns the name of the device metric for `what`. [`cards`] reads different metrics for the GPUs
/// of a group.
fn whole(what: &str) -> &'static str {
    match what {
        "total" => "bursar_device_total_bytes",
        "overhead" => "bursar_overhead_bytes",
        _ => "bursar_foreign_bytes",
    }
}

/// Returns the GPUs of a group, sorted by name. Empty if the device is a single GPU.
fn cards(now: &Samples, group: &str) -> Vec<GpuView> {
    let mut names: Vec<_> = now
        .of("bursar_card_total_bytes", &[("group", group)])
        .map(|series| series.label("device").to_owned())
        .collect();
    names.sort();
    if names.len() < 2 {
        return Vec::new();
    }
    let card = |name: String| {
        let of_card = |what: &str| {
            now.bytes(&format!("bursar_card_{what}_bytes"), &[("group", group), ("device", &name)]).unwrap_or_default()
        };
        GpuView { pieces: pieces(now, group, of_card), drift: of_card("drift"), name }
    };
    names.into_iter().map(card).collect()
}

fn leases(now: &Samples, device: &str) -> Vec<LeaseView> {
    let mut leases: Vec<_> = now
        .of("bursar_lease_bytes", &[("device", device)])
        .map(|series| {
            let (model, class) = (series.label("model").to_owned(), series.label("class").to_owned());
            let other = |metric: &str| now.bytes(metric, &[("device", device), ("model", &model), ("class", &class)]);
            let (used, peak) = (other("bursar_lease_used_bytes"), other("bursar_lease_peak_bytes"));
            LeaseView { bytes: Bytes(series.value as u64), used, peak, model, class }
        })
        // A series whose leases have ended is kept for its peak.
        .filter(|lease| !lease.bytes.is_zero() || lease.peak.is_some_and(|peak| !peak.is_zero()))
        .collect();
    leases.sort_by(|one, other| other.bytes.cmp(&one.bytes).then_with(|| one.class.cmp(&other.class)));
    leases
}

/// Returns the pieces of the bar: the purpose of every byte. `own` returns the `total`, `overhead`
/// and `foreign` bytes of the device or GPU.
fn pieces(now: &Samples, device: &str, own: impl Fn(&str) -> Bytes) -> Vec<Piece> {
    let of_device = |metric: &str| now.bytes(metric, &[("device", device)]).unwrap_or_default();
    let mut sums: BTreeMap<MemoryPart, Bytes> = BTreeMap::new();
    let mut add = |part: MemoryPart, bytes: Bytes| {
        let sum = sums.entry(part).or_default();
        *sum = sum.saturating_add(bytes);
    };
    add(MemoryPart::Overhead, own("overhead"));
    add(MemoryPart::Foreign, own("foreign"));
    add(MemoryPart::Canary, of_device("bursar_canary_bytes"));
    for series in now.of("bursar_lease_bytes", &[("device", device)]) {
        let bytes = Bytes(series.value as u64);
        match MemoryPart::of_class(series.label("class")) {
            None => {}
            Some(MemoryPart::KvFree) => {
                let (used, cached) = kv_shares(now, series.label("model"), bytes);
                add(MemoryPart::KvUsed, used);
                add(MemoryPart::KvCached, cached);
                add(MemoryPart::KvFree, bytes.saturating_sub(used).saturating_sub(cached));
            }
            Some(part) => add(part, bytes),
        }
    }
    let granted = sums.values().fold(Bytes::ZERO, |sum, bytes| sum.saturating_add(*bytes));
    sums.insert(MemoryPart::Free, own("total").saturating_sub(granted));
    let piece = |part| Some(Piece { part, bytes: *sums.get(&part).filter(|bytes| !bytes.is_zero())? });
    MemoryPart::ALL.into_iter().filter_map(piece).collect()
}

/// Returns the bytes of a pool's used blocks, and of its unused blocks with reusable content.
fn kv_shares(now: &Samples, model: &str, pool: Bytes) -> (Bytes, Bytes) {
    let blocks = |metric: &str| now.value(metric, &[("model", model)]).unwrap_or(0.0);
    let all = blocks("bursar_kv_blocks");
    let share = |blocks: f64| pool.share((blocks / all).clamp(0.0, 1.0));
    if all <= 0.0 {
        return (Bytes::ZERO, Bytes::ZERO);
    }
    let used = share(blocks("bursar_kv_blocks_used"));
    (used, share(blocks("bursar_kv_blocks_cached")).min(pool.saturating_sub(used)))
}

//! A copy of the ledger's state at one moment, to print, send and compare.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;

use crate::{
    Bytes, Class, Gate, Label, LeaseId, Ledger, Memory, Owner, Priority, RequestId,
    ledger::{RequestKind, State},
    table,
};

/// Every byte of a device, by class and owner.
///
/// Equality compares all fields, so `==` checks whether the ledger has returned to an earlier
/// state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    pub total: Bytes,
    /// Bytes that are neither granted, overhead, foreign nor part of the canary.
    pub free: Bytes,
    /// Bytes that this process holds outside leases.
    pub overhead: Bytes,
    /// Bytes that other processes hold.
    pub foreign: Bytes,
    /// The bytes that are kept free now.
    pub canary: Bytes,
    /// The configured size of the canary.
    pub canary_wanted: Bytes,
    /// The sum of all leases of device memory.
    pub granted: Bytes,
    /// The bytes by which `granted + overhead + foreign + canary` exceeds `total`; 0
    /// if it does not.
    pub deficit: Bytes,
    /// The limit for all leases of host memory.
    pub host_total: Bytes,
    /// The sum of all leases of host memory.
    pub host_granted: Bytes,
    /// All leases, ordered by number.
    pub leases: Vec<LeaseLine>,
    /// Sums by class, in the order of [`Class`].
    pub classes: Vec<ClassLine>,
    /// Waiting requests in the order of service: first requests for device memory,
    /// then for host memory.
    pub waiting: Vec<WaitingLine>,
    pub gates: Vec<GateLine>,
    /// The GPUs of a [group](crate::DeviceGroup) by rank, as last measured. Empty
    /// for a single device.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cards: Vec<GpuLine>,
}

/// One GPU of a group. Every grant counts on each GPU of the group. The sums of the snapshot are
/// the values of the fullest GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GpuLine {
    /// The GPU's label, such as `cuda:1`.
    pub device: String,
    pub total: Bytes,
    /// Bytes that this process holds on this GPU outside leases.
    pub overhead: Bytes,
    /// Bytes that other processes hold on this GPU.
    pub foreign: Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeaseLine {
    pub id: LeaseId,
    pub class: Class,
    pub owner: Owner,
    pub model: Label,
    pub bytes: Bytes,
    pub state: LeaseState,
}

/// The progress of a lease from granted to freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseState {
    Held,
    /// The lease is in use, but its tail waits for a fence.
    Shrinking,
    /// The lease has ended, and all of it waits for a fence.
    Revoking,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ClassLine {
    pub class: Class,
    /// The number of leases of this class.
    pub leases: usize,
    pub bytes: Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WaitingLine {
    pub request: RequestId,
    /// The lease that would grow; `None` for a new lease.
    pub grows: Option<LeaseId>,
    /// How many more bytes are requested.
    pub bytes: Bytes,
    pub priority: Priority,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GateLine {
    pub model: Label,
    pub gate: Gate,
}

impl GpuLine {
    /// The GPU on which overhead and other processes leave the least memory. Returns `None` if
    /// there are fewer than two GPUs, or all GPUs have the same amount left.
    pub fn fullest_of(cards: &[GpuLine]) -> Option<&GpuLine> {
        let left = |card: &&GpuLine| card.total.saturating_sub(card.overhead + card.foreign);
        let fullest = cards.iter().min_by_key(left)?;
        cards.iter().any(|card| left(&card) > left(&fullest)).then_some(fullest)
    }
}

impl Ledger {
    /// A copy of all sums, leases, gates and waiting requests.
    pub fn snapshot(&self) -> Snapshot {
        let (device, host) = (self.account(Memory::Device), self.account(Memory::Host));
        let leases: Vec<_> = self
            .entries()
            .map(|entry| LeaseLine {
                id: entry.holding.id,
                class: entry.holding.class.clone(),
                owner: entry.holding.owner.clone(),
                model: entry.holding.model.clone(),
                bytes: entry.holding.bytes,
                state: match entry.state {
                    State::Held => LeaseState::Held,
                    State::Shrinking { .. } => LeaseState::Shrinking,
                    State::Revoking => LeaseState::Revoking,
                },
            })
            .collect();
        let mut sums: BTreeMap<&Class, (usize, Bytes)> = BTreeMap::new();
        for lease in &leases {
            let sum = sums.entry(&lease.class).or_default();
            *sum = (sum.0 + 1, sum.1 + lease.bytes);
        }
        let classes = sums
            .into_iter()
            .map(|(class, (leases, bytes))| ClassLine { class: class.clone(), leases, bytes })
            .collect();
        let waiting = self.waiting().map(|waiting| WaitingLine {
            request: waiting.id,
            grows: match waiting.kind {
                RequestKind::Grow { lease, .. } => Some(lease),
                RequestKind::New(_) => None,
            },
            bytes: waiting.bytes,
            priority: waiting.priority,
        });
        Snapshot {
            total: device.total,
            free: device.free(),
            overhead: device.overhead,
            foreign: device.foreign,
            canary: device.canary,
            canary_wanted: device.canary_wanted,
            granted: device.granted,
            deficit: device.deficit(),
            host_total: host.total,
            host_granted: host.granted,
            classes,
            waiting: waiting.collect(),
            gates: self.gates().map(|(model, gate)| GateLine { model: model.clone(), gate }).collect(),
            leases,
            cards: Vec::new(),
        }
    }
}

impl Snapshot {
    pub fn of_class(&self, class: &Class) -> Bytes {
        self.classes.iter().find(|line| line.class == *class).map_or(Bytes::ZERO, |line| line.bytes)
    }

    /// The sum of a model's leases of device memory.
    pub fn of_model(&self, model: &Label) -> Bytes {
        let of_it = |lease: &&LeaseLine| lease.model == *model && lease.class.memory() == Memory::Device;
        self.leases.iter().filter(of_it).map(|lease| lease.bytes).sum()
    }

    /// The maximum number of bytes that a model could hold, including its current leases: all
    /// memory that is not taken by overhead, other processes, other models or the canary.
    pub fn capacity_of(&self, model: &Label) -> Bytes {
        let others = self.granted - self.of_model(model);
        self.total.saturating_sub(self.overhead + self.foreign + self.canary_wanted + others)
    }

    /// Bytes of a GPU that are neither granted, overhead, foreign nor part of the canary.
    pub fn free_on(&self, card: &GpuLine) -> Bytes {
        card.total.saturating_sub(card.overhead + card.foreign + self.granted + self.canary)
    }

    /// Returns one row for each class, model and owner, so that a model with one lease per layer
    /// still prints a short table. Leases that are being revoked have separate rows.
    fn rows(&self, memory: Memory, whole: Bytes) -> Vec<[String; 6]> {
        let mut groups: BTreeMap<(&Class, &Label, &Owner, bool), (usize, Bytes)> = BTreeMap::new();
        for lease in self.leases.iter().filter(|lease| lease.class.memory() == memory) {
            let key = (&lease.class, &lease.model, &lease.owner, lease.state == LeaseState::Revoking);
            let group = groups.entry(key).or_default();
            *group = (group.0 + 1, group.1 + lease.bytes);
        }
        let rows = groups.into_iter().map(|((class, model, owner, is_revoking), (leases, bytes))| {
            let mut holder = owner.to_string();
            if leases > 1 {
                holder += &format!(" x{leases}");
            }
            if is_revoking {
                holder += " (revoking)";
            }
            row(&class.label(), model.as_str(), &holder, bytes, whole)
        });
        rows.collect()
    }
}

fn row(class: &str, model: &str, holder: &str, bytes: Bytes, whole: Bytes) -> [String; 6] {
    let bar = table::bar(bytes, whole);
    [class.into(), model.into(), holder.into(), bytes.exact(), bytes.to_string(), bar]
}

impl fmt::Display for Snapshot {
    /// Prints one line per claimant, with its bytes and a bar, one line per sum, and one line per
    /// waiting request.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = self.rows(Memory::Device, self.total);
        let sum = |name: &str, note: &str, bytes| row(name, "", note, bytes, self.total);
        rows.push(sum("granted", "", self.granted));
        rows.push(sum("overhead", "driver, kernels", self.overhead));
        rows.push(sum("foreign", "other processes", self.foreign));
        let given_up = if self.canary < self.canary_wanted { "(given up)" } else { "kept free" };
        rows.push(sum("canary", given_up, self.canary));
        rows.push(sum("free", "", self.free));
        rows.push(sum("total", "", self.total));
        if !self.deficit.is_zero() {
            rows.push(sum("short by", "", self.deficit));
        }
        for card in &self.cards {
            rows.push(row("card", &card.device, "foreign", card.foreign, card.total));
            rows.push(row("card", &card.device, "free", self.free_on(card), card.total));
        }
        if !self.host_granted.is_zero() {
            rows.extend(self.rows(Memory::Host, self.host_total));
            rows.push(row("host total", "", "", self.host_total, self.host_total));
        }
        for line in table::align(&rows, [false, false, false, true, true, false]) {
            writeln!(f, "{line}")?;
        }
        for waiting in &self.waiting {
            writeln!(f, "waiting: {} for {} ({})", waiting.request, waiting.bytes.exact(), waiting.priority)?;
        }
        Ok(())
    }
}

//! The ledger at one moment, to print, send and compare.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;

use crate::{
    Bytes, Class, Gate, Label, LeaseId, Ledger, Memory, Owner, Priority, RequestId,
    ledger::{RequestKind, State},
    table,
};

/// Every byte of a device, by class and owner.
///
/// Two snapshots are equal if the same leases are held, so `==` tells whether the ledger is back where it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// All memory of the device.
    pub total: Bytes,
    /// Neither granted, nor overhead, nor foreign, nor kept free.
    pub free: Bytes,
    /// What our process holds outside leases.
    pub overhead: Bytes,
    /// What other processes hold.
    pub foreign: Bytes,
    /// What is kept free now.
    pub canary: Bytes,
    /// What should be kept free.
    pub canary_wanted: Bytes,
    /// The sum of all device leases.
    pub granted: Bytes,
    /// By how many bytes rule 1 is broken.
    pub deficit: Bytes,
    /// The host memory that may be leased.
    pub host_total: Bytes,
    /// The sum of all leases of host memory.
    pub host_granted: Bytes,
    /// Every lease, by number.
    pub leases: Vec<LeaseLine>,
    /// The sums by class, in the order of [`Class`].
    pub classes: Vec<ClassLine>,
    /// Requests that wait, the next one first: for device memory, then for host memory.
    pub waiting: Vec<WaitingLine>,
    /// The gate of each model.
    pub gates: Vec<GateLine>,
    /// The cards of a [group](crate::DeviceGroup), by rank, as last looked at. Empty for one device.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cards: Vec<GpuLine>,
}

/// One card of a group. What is granted is granted on each, and the sums of the snapshot are those of the fullest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GpuLine {
    /// The card's label, such as `cuda:1`.
    pub device: String,
    /// All memory of the card.
    pub total: Bytes,
    /// What our process holds there outside leases.
    pub overhead: Bytes,
    /// What other processes hold there.
    pub foreign: Bytes,
}

/// One lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeaseLine {
    /// The lease's number.
    pub id: LeaseId,
    /// What the bytes are for.
    pub class: Class,
    /// The actor that holds it.
    pub owner: Owner,
    /// The model that it serves.
    pub model: Label,
    /// Its size.
    pub bytes: Bytes,
    /// Whether it is in use, shrinking or being taken back.
    pub state: LeaseState,
}

/// How far a lease is on its way from granted to freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseState {
    /// In use.
    Held,
    /// In use; its tail waits for a fence.
    Shrinking,
    /// Ended; all of it waits for a fence.
    Revoking,
}

/// The leases of one class, summed up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ClassLine {
    /// The class.
    pub class: Class,
    /// How many leases there are.
    pub leases: usize,
    /// Their sum.
    pub bytes: Bytes,
}

/// One request that waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WaitingLine {
    /// The request's number.
    pub request: RequestId,
    /// The lease that should grow; `None` for a new lease.
    pub grows: Option<LeaseId>,
    /// How many more bytes are wanted.
    pub bytes: Bytes,
    /// The priority that it waits at.
    pub priority: Priority,
}

/// One model's gate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GateLine {
    /// The model.
    pub model: Label,
    /// Its gate.
    pub gate: Gate,
}

impl GpuLine {
    /// The card on which overhead and other processes leave the least. None of one card alone, or if all leave the same.
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
            grows: match waiting.wish {
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
    /// The sum of a class's leases.
    pub fn of_class(&self, class: &Class) -> Bytes {
        self.classes.iter().find(|line| line.class == *class).map_or(Bytes::ZERO, |line| line.bytes)
    }

    /// The sum of a model's leases of device memory.
    pub fn of_model(&self, model: &Label) -> Bytes {
        let of_it = |lease: &&LeaseLine| lease.model == *model && lease.class.memory() == Memory::Device;
        self.leases.iter().filter(of_it).map(|lease| lease.bytes).sum()
    }

    /// The most that a model could hold, with what it holds now: all that other processes, other models and the canary
    /// leave.
    pub fn room_of(&self, model: &Label) -> Bytes {
        let others = self.granted - self.of_model(model);
        self.total.saturating_sub(self.overhead + self.foreign + self.canary_wanted + others)
    }

    /// What is neither granted, nor overhead, nor foreign, nor kept free on a card.
    pub fn free_on(&self, card: &GpuLine) -> Bytes {
        card.total.saturating_sub(card.overhead + card.foreign + self.granted + self.canary)
    }

    /// Leases of one class, model, owner and state share a line, so that a model with a lease for each layer still
    /// prints short.
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
    /// A line for each claimant, in bytes and as a bar, and a line for each sum.
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

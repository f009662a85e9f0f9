//! Evidence of a memory refusal.

use std::fmt;

use bursar_budgets::{Bytes, Class, DeviceError, GpuLine, Refusal, Snapshot};
use bursar_kernels::{KernelError, OpenError};
use serde::Serialize;

use super::{Phase, ProfileError};
use crate::{budget::LeaseError, compute::lane::LaneError};

/// Facts about a memory refusal: the requested bytes and the bytes that were free.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Evidence {
    pub phase: Phase,
    /// The class of the lease. `None` if the driver needed the memory itself, for example for a
    /// kernel launch.
    pub class: Option<Class>,
    /// Bytes requested. 0 if the error does not report them.
    pub asked: Bytes,
    /// Free bytes, as reported by the budget or the device that refused.
    pub free: Bytes,
    /// Bytes held by other processes.
    pub foreign: Bytes,
    /// For a group of GPUs: the GPU that refused or, if the error names no GPU, the GPU with the
    /// least memory left. `None` for a single device, or if all GPUs have the same amount left.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub card: Option<String>,
    #[serde(rename = "said")]
    pub message: String,
}

impl Evidence {
    /// Returns the evidence if `error` is a memory refusal. `ledger` supplies the foreign bytes,
    /// and the free bytes if the error does not report them.
    pub fn of(error: &ProfileError, phase: Phase, ledger: Option<&Snapshot>) -> Option<Self> {
        let (class, (asked, free), refused) = match error {
            ProfileError::Lease { class, source: LeaseError::Refused(refusal), .. } => {
                (class.as_deref(), ledgers(refusal), None)
            }
            ProfileError::Device { class, source, .. } => (class.as_deref(), devices(source)?, Some(source)),
            ProfileError::Lanes(OpenError::Device(source)) => (None, devices(source)?, Some(source)),
            ProfileError::Stress { source: LaneError::Kernel(KernelError::Device(source)), .. } => {
                (None, devices(source)?, Some(source))
            }
            _ => return None,
        };
        let free = free.or(ledger.map(|ledger| ledger.free)).unwrap_or_default();
        let foreign = ledger.map(|ledger| ledger.foreign).unwrap_or_default();
        let fullest = || GpuLine::fullest_of(&ledger?.cards).map(|card| card.device.clone());
        let card = refused.and_then(DeviceError::card).map(str::to_owned).or_else(fullest);
        Some(Evidence { phase, class: class.cloned(), asked, free, foreign, card, message: error.to_string() })
    }

    /// Returns a lower bound of the missing bytes. If at least the requested bytes were free, the
    /// driver needed an unknown amount for itself, and all requested bytes are returned.
    pub fn missing(&self) -> Bytes {
        match self.asked.saturating_sub(self.free) {
            Bytes::ZERO => self.asked,
            short => short,
        }
    }
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory was refused in phase {}: {}", self.phase, self.message)?;
        if let Some(class) = &self.class {
            write!(f, "; the memory was for {class}")?;
        }
        let [asked, free, foreign] = [self.asked, self.free, self.foreign].map(Bytes::exact);
        write!(f, "; {asked} requested, {free} free, {foreign} held by other processes")?;
        self.card.iter().try_for_each(|card| write!(f, ", on {card}"))
    }
}

impl ProfileError {
    /// Whether a smaller target may succeed.
    pub fn is_out_of_memory(&self) -> bool {
        Evidence::of(self, Phase::Probe, None).is_some()
    }
}

/// The requested bytes, and the free bytes if they are known.
type AskedAndFree = (Bytes, Option<Bytes>);

/// Returns the bytes of a refusal by the ledger. Every such refusal counts as a memory refusal:
/// either memory is short, or the cause may be gone by the next attempt.
fn ledgers(refusal: &Refusal) -> AskedAndFree {
    match refusal {
        Refusal::Short { asked, available, .. } => (*asked, Some(*available)),
        Refusal::TooLarge { asked, attainable, .. } => (*asked, Some(*attainable)),
        Refusal::Behind { asked, .. } | Refusal::GateClosed { asked, .. } => (*asked, None),
        Refusal::Overloaded(_)
        | Refusal::OwnerDead { .. }
        | Refusal::PredecessorHolds { .. }
        | Refusal::NotHeld { .. }
        | Refusal::Nothing
        | Refusal::CanaryAsked
        | Refusal::Withdrawn => (Bytes::ZERO, None),
    }
}

fn devices(error: &DeviceError) -> Option<AskedAndFree> {
    match error.of_any_card() {
        DeviceError::Refused { asked, free, .. } => Some((*asked, Some(*free))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use bursar_budgets::{Ledger, LedgerConfig};

    use super::*;

    const MIB: fn(u64) -> Bytes = Bytes::mib;

    /// A ledger with 5 MiB free and 7 MiB held by other processes.
    fn ledger() -> Snapshot {
        let empty = Ledger::new(LedgerConfig::new(MIB(64))).snapshot();
        Snapshot { free: MIB(5), foreign: MIB(7), ..empty }
    }

    fn lease(refusal: Refusal) -> ProfileError {
        ProfileError::Lease { doing: "leasing", class: Some(Box::new(Class::Kv)), source: refusal.into() }
    }

    fn device(source: DeviceError) -> ProfileError {
        ProfileError::Device { doing: "backing", class: Some(Box::new(Class::Weights)), source }
    }

    fn stress(source: LaneError) -> ProfileError {
        ProfileError::Stress { worst_case: "largest step", source }
    }

    /// The error of a device with 3 MiB free when 9 MiB are requested.
    fn refused() -> DeviceError {
        DeviceError::Refused { asked: MIB(9), free: MIB(3), hint: String::new() }
    }

    #[test]
    fn evidence_reports_the_requested_and_the_free_bytes() {
        let (asked, short_by) = (MIB(9), MIB(1));
        let refusals = [
            (lease(Refusal::Short { asked, available: MIB(4), short_by }), Some(Class::Kv), 9, 4),
            (lease(Refusal::TooLarge { asked, attainable: MIB(8), short_by }), Some(Class::Kv), 9, 8),
            (lease(Refusal::Behind { asked, ahead: 1 }), Some(Class::Kv), 9, 5),
            (lease(Refusal::Nothing), Some(Class::Kv), 0, 5),
            (device(refused()), Some(Class::Weights), 9, 3),
            (OpenError::Device(refused()).into(), None, 9, 3),
            (stress(LaneError::Kernel(KernelError::Device(refused()))), None, 9, 3),
        ];
        for (error, class, asked, free) in refusals {
            let message = error.to_string();
            let expected = Evidence {
                phase: Phase::Back,
                class,
                asked: MIB(asked),
                free: MIB(free),
                foreign: MIB(7),
                card: None,
                message,
            };
            assert_eq!(Evidence::of(&error, Phase::Back, Some(&ledger())), Some(expected));
            assert!(error.is_out_of_memory());
        }
    }

    #[test]
    fn errors_unrelated_to_memory_give_no_evidence() {
        let lost = || DeviceError::Lost { reason: "it fell".into() };
        let errors = [
            device(lost()),
            OpenError::Device(lost()).into(),
            stress(LaneError::Kernel(KernelError::Device(lost()))),
            stress(LaneError::Gone),
            ProfileError::TooSmall { tokens: 1, context_tokens: 2 },
        ];
        for error in errors {
            assert_eq!(Evidence::of(&error, Phase::Back, Some(&ledger())), None, "{error}");
        }
    }

    #[test]
    fn evidence_reads_as_a_sentence_with_exact_bytes() {
        let (asked, free, foreign) = (Bytes(9), Bytes(4), Bytes(7));
        let message = "it is full".to_owned();
        let known = Evidence { phase: Phase::Back, class: Some(Class::Kv), asked, free, foreign, card: None, message };
        assert_eq!(
            known.to_string(),
            "memory was refused in phase back: it is full; the memory was for kv; 9 B requested, 4 B free, 7 B held by \
             other processes"
        );
        assert_eq!(known.missing(), Bytes(5));
        let drivers = Evidence { class: None, free: Bytes(20), ..known };
        assert_eq!(
            drivers.to_string(),
            "memory was refused in phase back: it is full; 9 B requested, 20 B free, 7 B held by other processes"
        );
        assert_eq!(drivers.missing(), Bytes(9), "the driver used more than it reported");
    }

    #[test]
    fn evidence_names_the_card_that_refused_or_has_least_free() {
        let card = |device: &str, foreign| GpuLine {
            device: device.to_owned(),
            total: MIB(64),
            overhead: Bytes::ZERO,
            foreign: MIB(foreign),
        };
        let ledger = Snapshot { cards: vec![card("cuda:0", 7), card("cuda:1", 1)], ..ledger() };
        let refused_on = |card: &str| DeviceError::OfCard { card: card.to_owned(), source: Box::new(refused()) };
        let evidence = |error| Evidence::of(&error, Phase::Back, Some(&ledger)).expect("the device refuses memory");
        let by_device = evidence(device(refused_on("cuda:1")));
        assert_eq!((by_device.card.as_deref(), by_device.asked, by_device.free), (Some("cuda:1"), MIB(9), MIB(3)));
        let by_lane = evidence(stress(LaneError::Kernel(KernelError::Device(refused_on("cuda:1")))));
        assert_eq!(by_lane.card.as_deref(), Some("cuda:1"));
        let by_ledger = evidence(lease(Refusal::Behind { asked: MIB(9), ahead: 1 }));
        assert_eq!(by_ledger.card.as_deref(), Some("cuda:0"));
        assert!(by_ledger.to_string().ends_with("7,340,032 B held by other processes, on cuda:0"), "{by_ledger}");
    }
}

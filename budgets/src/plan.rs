//! The memory plan of a model: one line per claimant, computed before the model takes any memory.

use std::fmt;

use serde::Serialize;

use crate::{Bytes, Class, Hint, Memory, table};

/// One claimant's line in a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Claim {
    pub class: Class,
    /// The purpose of the bytes, as text for users.
    pub what: String,
    pub bytes: Bytes,
    /// How the number was computed: `2 layers x 96 blocks x 16 tokens x 512 B`.
    pub how: String,
}

/// All the memory that one model will claim on a device and on the host.
///
/// ```
/// use bursar_budgets::*;
/// let plan = MemoryPlan::new()
///     .claim(Class::Weights, "demo", Bytes::mib(8), "3.6 M parameters x 2 B")
///     .claim(Class::Kv, "probe", Bytes::mib(4), "8,192 tokens x 512 B");
/// assert_eq!(plan.total(), Bytes::mib(12));
/// let knobs = vec![Knob::new("kv_tokens", "8,192", "4,096")];
/// let error = plan.fits(Bytes::mib(10), || knobs).unwrap_err();
/// assert_eq!(error.short_by, Bytes::mib(2));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    claims: Vec<Claim>,
}

/// A setting that a user can change, and the value that would make the plan fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Knob {
    pub name: String,
    pub now: String,
    /// The value that would make the plan fit, with no other change; `None` if no value does.
    pub would_fit: Option<String>,
}

impl Knob {
    /// A knob that makes the plan fit when set to `would_fit`.
    pub fn new(name: &str, now: impl fmt::Display, would_fit: impl fmt::Display) -> Knob {
        Knob { name: name.into(), now: now.to_string(), would_fit: Some(would_fit.to_string()) }
    }

    /// A knob that cannot make the plan fit by itself.
    pub fn hopeless(name: &str, now: impl fmt::Display) -> Knob {
        Knob { name: name.into(), now: now.to_string(), would_fit: None }
    }

    /// One sentence that recommends values and names the knobs that cannot help by themselves.
    /// Names without spaces are in backticks. `None` if there are no knobs.
    pub fn advice(knobs: &[Knob]) -> Option<String> {
        let name = |knob: &Knob| if knob.name.contains(' ') { knob.name.clone() } else { format!("`{}`", knob.name) };
        let helpful = knobs.iter().filter_map(|knob| {
            let value = knob.would_fit.as_ref()?;
            Some(format!("set {} to {value} instead of {}", name(knob), knob.now))
        });
        let helpful = Some(helpful.collect::<Vec<_>>().join("; or ")).filter(|helpful| !helpful.is_empty());
        let hopeless = knobs.iter().filter(|knob| knob.would_fit.is_none());
        let hopeless = hopeless.map(|knob| format!("changing only {} is not enough", name(knob)));
        let advice = helpful.into_iter().chain(hopeless).collect::<Vec<_>>().join("; ");
        Some(advice).filter(|advice| !advice.is_empty())
    }
}

/// The error of a plan that needs more memory than is available.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[error(
    "the plan needs {} ({needed}), but only {} ({available}) are available: {} ({short_by}) short",
    needed.exact(),
    available.exact(),
    short_by.exact()
)]
pub struct DoesNotFit {
    pub needed: Bytes,
    pub available: Bytes,
    pub short_by: Bytes,
    /// The knobs that reduce the plan, including knobs that cannot make it fit by themselves.
    pub knobs: Vec<Knob>,
}

impl Hint for DoesNotFit {
    type Text = Option<String>;

    fn hint(&self) -> Option<String> {
        Knob::advice(&self.knobs)
    }
}

impl MemoryPlan {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a line, as a builder step.
    pub fn claim(mut self, class: Class, what: impl Into<String>, bytes: Bytes, how: impl Into<String>) -> Self {
        self.push(class, what, bytes, how);
        self
    }

    pub fn push(&mut self, class: Class, what: impl Into<String>, bytes: Bytes, how: impl Into<String>) {
        self.claims.push(Claim { class, what: what.into(), bytes, how: how.into() });
    }

    /// All lines, in insertion order.
    pub fn claims(&self) -> &[Claim] {
        &self.claims
    }

    /// The sum of all lines of device memory.
    pub fn total(&self) -> Bytes {
        let of_device = self.claims.iter().filter(|claim| claim.class.memory() == Memory::Device);
        of_device.map(|claim| claim.bytes).sum()
    }

    pub fn of_class(&self, class: &Class) -> Bytes {
        self.claims.iter().filter(|claim| claim.class == *class).map(|claim| claim.bytes).sum()
    }

    /// Checks whether the plan fits. The knobs are computed only if the plan does not fit, because
    /// computing them may require many more plans.
    ///
    /// # Errors
    /// [`DoesNotFit`], with the computed knobs.
    pub fn fits(&self, available: Bytes, knobs: impl FnOnce() -> Vec<Knob>) -> Result<(), DoesNotFit> {
        let needed = self.total();
        match needed.checked_sub(available).filter(|short_by| !short_by.is_zero()) {
            None => Ok(()),
            Some(short_by) => Err(DoesNotFit { needed, available, short_by, knobs: knobs() }),
        }
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |class: &str, what: &str, bytes: Bytes, how: &str| {
            [class.to_string(), what.to_string(), bytes.exact(), bytes.to_string(), how.to_string()]
        };
        let mut rows: Vec<_> =
            self.claims.iter().map(|claim| row(&claim.class.label(), &claim.what, claim.bytes, &claim.how)).collect();
        rows.push(row("total", "", self.total(), ""));
        for line in table::align(&rows, [false, false, true, true, false]) {
            writeln!(f, "{line}")?;
        }
        Ok(())
    }
}

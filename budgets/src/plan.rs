//! What a model will need, one line a claimant, before any of it is taken.

use std::fmt;

use serde::Serialize;

use crate::{Bytes, Class, Hint, table};

/// One claimant's line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Claim {
    /// What kind of memory.
    pub class: Class,
    /// What it is for, as a person says it.
    pub what: String,
    /// How much.
    pub bytes: Bytes,
    /// How that number came about: `2 layers x 96 blocks x 16 tokens x 512 B`.
    pub how: String,
}

/// Everything that one model will claim of a device.
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

/// Something a user can set, and what it would have to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Knob {
    /// Its name, as it is set.
    pub name: String,
    /// Its value now.
    pub now: String,
    /// The value, of this knob alone, with which the plan would fit; nothing if no value does.
    pub would_fit: Option<String>,
}

impl Knob {
    /// A knob that would make the plan fit at this value.
    pub fn new(name: &str, now: impl fmt::Display, would_fit: impl fmt::Display) -> Knob {
        Knob { name: name.into(), now: now.to_string(), would_fit: Some(would_fit.to_string()) }
    }

    /// A knob that cannot make the plan fit alone.
    pub fn hopeless(name: &str, now: impl fmt::Display) -> Knob {
        Knob { name: name.into(), now: now.to_string(), would_fit: None }
    }

    /// What they say together, in one sentence; nothing if there are none. What can be set stands in backticks.
    pub fn advice(knobs: &[Knob]) -> Option<String> {
        let advice = knobs.iter().map(|knob| {
            let name = if knob.name.contains(' ') { knob.name.clone() } else { format!("`{}`", knob.name) };
            match &knob.would_fit {
                Some(value) => format!("{name} {value} instead of {} would fit", knob.now),
                None => format!("{name} alone is not enough"),
            }
        });
        Some(advice.collect::<Vec<_>>().join("; ")).filter(|advice| !advice.is_empty())
    }
}

/// A plan is larger than what it could get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[error(
    "the plan needs {} ({needed}), of which {} ({available}) are available: {} ({short_by}) short",
    needed.exact(),
    available.exact(),
    short_by.exact()
)]
pub struct DoesNotFit {
    /// The plan's total.
    pub needed: Bytes,
    /// What it could get.
    pub available: Bytes,
    /// The difference.
    pub short_by: Bytes,
    /// What would make it fit.
    pub knobs: Vec<Knob>,
}

impl Hint for DoesNotFit {
    type Text = Option<String>;

    fn hint(&self) -> Option<String> {
        Knob::advice(&self.knobs)
    }
}

impl MemoryPlan {
    /// A plan that claims nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same plan with one more line.
    pub fn claim(mut self, class: Class, what: impl Into<String>, bytes: Bytes, how: impl Into<String>) -> Self {
        self.push(class, what, bytes, how);
        self
    }

    /// Adds a line.
    pub fn push(&mut self, class: Class, what: impl Into<String>, bytes: Bytes, how: impl Into<String>) {
        self.claims.push(Claim { class, what: what.into(), bytes, how: how.into() });
    }

    /// All lines, in the order in which they were claimed.
    pub fn claims(&self) -> &[Claim] {
        &self.claims
    }

    /// What all lines sum up to.
    pub fn total(&self) -> Bytes {
        self.claims.iter().map(|claim| claim.bytes).sum()
    }

    /// What the lines of one class sum up to.
    pub fn of_class(&self, class: &Class) -> Bytes {
        self.claims.iter().filter(|claim| claim.class == *class).map(|claim| claim.bytes).sum()
    }

    /// Whether the plan fits. The knobs are worked out only if it does not: that may take many plans.
    ///
    /// # Errors
    /// [`DoesNotFit`], with the knobs.
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

//! Deliberate memory refusals, to test how a start reacts.

use std::str::FromStr;

use bursar_budgets::Hint;

use super::{ATTEMPTS_MAX, Phase, UnknownPhase};

/// The phases and attempts in which memory is refused once. Empty by default.
///
/// The text form is `PHASE:N[,PHASE:N]`: each of the first N attempts is refused memory once in
/// that phase, if it reaches the phase.
///
/// ```
/// use bursar_actors::profile::{FaultPlan, Phase};
/// let faults: FaultPlan = "load:1,validate:2".parse()?;
/// assert!(faults.is_due(Phase::Load, 0) && !faults.is_due(Phase::Load, 1));
/// assert!(faults.is_due(Phase::Validate, 1) && !faults.is_due(Phase::Validate, 2));
/// let error = "stress:1".parse::<FaultPlan>().unwrap_err();
/// assert_eq!(error.to_string(), "there is no phase \"stress\"");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan(Vec<(Phase, u32)>);

impl FaultPlan {
    pub fn none() -> Self {
        Self::default()
    }

    /// Adds one refusal in `phase` of each of the first `attempts` attempts.
    #[must_use]
    pub fn refuse(mut self, phase: Phase, attempts: u32) -> Self {
        self.0.push((phase, attempts));
        self
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether memory is refused in `phase` of attempt `attempt`, counted from 0.
    pub fn is_due(&self, phase: Phase, attempt: u32) -> bool {
        self.0.iter().any(|(at, attempts)| *at == phase && attempt < *attempts)
    }

    pub fn has(&self, phase: Phase) -> bool {
        self.is_due(phase, 0)
    }
}

/// A fault plan that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultPlanError {
    #[error(transparent)]
    Phase(#[from] UnknownPhase),
    /// An element of the list is not a phase and a number.
    #[error("{part:?} does not have the form PHASE:N")]
    Form {
        /// The element as written.
        part: String,
    },
    /// The number of attempts is 0 or above [`ATTEMPTS_MAX`].
    #[error("the number of refused attempts is {attempts}; expected 1 to {ATTEMPTS_MAX}")]
    Attempts { attempts: u64 },
}

impl Hint for FaultPlanError {
    type Text = String;

    fn hint(&self) -> String {
        let phases = Phase::ALL.map(Phase::name).join(", ");
        match self {
            FaultPlanError::Phase(_) => format!("use one of the phases {phases}"),
            FaultPlanError::Form { .. } => "write validate:2, or load:1,validate:2".to_owned(),
            FaultPlanError::Attempts { .. } => format!("write a number from 1 to {ATTEMPTS_MAX}"),
        }
    }
}

impl FromStr for FaultPlan {
    type Err = FaultPlanError;

    fn from_str(script: &str) -> Result<Self, FaultPlanError> {
        let mut faults = FaultPlan::none();
        for part in script.split(',').map(str::trim) {
            let form = || FaultPlanError::Form { part: part.to_owned() };
            let (phase, attempts) = part.split_once(':').ok_or_else(form)?;
            let phase = phase.trim().parse()?;
            let attempts: u64 = attempts.trim().parse().map_err(|_| form())?;
            if attempts == 0 || attempts > u64::from(ATTEMPTS_MAX) {
                return Err(FaultPlanError::Attempts { attempts });
            }
            faults = faults.refuse(phase, attempts as u32);
        }
        Ok(faults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_script_sets_the_refused_attempts_of_each_phase() {
        for phase in Phase::ALL {
            let faults: FaultPlan = format!(" {phase} : 4 ").parse().expect("every phase can be refused");
            assert_eq!(faults, FaultPlan::none().refuse(phase, 4));
            assert!(faults.has(phase) && faults.is_due(phase, 3) && !faults.is_due(phase, 4));
        }
        assert!(Phase::ALL.iter().all(|phase| !FaultPlan::none().has(*phase)));
    }

    #[test]
    fn a_malformed_fault_script_is_refused_with_the_expected_form() {
        for (script, message) in [
            ("", "\"\" does not have the form PHASE:N"),
            ("load", "\"load\" does not have the form PHASE:N"),
            ("load:x", "\"load:x\" does not have the form PHASE:N"),
            ("load:-1", "\"load:-1\" does not have the form PHASE:N"),
            ("load:1,", "\"\" does not have the form PHASE:N"),
            ("warmup:1", "there is no phase \"warmup\""),
            ("load:0", "the number of refused attempts is 0; expected 1 to 4"),
            ("load:5", "the number of refused attempts is 5; expected 1 to 4"),
        ] {
            let error = script.parse::<FaultPlan>().expect_err(script);
            assert_eq!(error.to_string(), message);
            assert!(!error.hint().is_empty());
        }
    }

    #[test]
    fn each_mistake_in_a_fault_script_has_a_specific_hint() {
        for (script, hint) in [
            ("warmup:1", "use one of the phases load, probe, capture, back, validate, serve"),
            ("load", "write validate:2, or load:1,validate:2"),
            ("load:5", "write a number from 1 to 4"),
        ] {
            assert_eq!(script.parse::<FaultPlan>().expect_err(script).hint(), hint);
        }
    }

    #[test]
    fn a_fault_plan_is_empty_until_a_refusal_is_added() {
        assert!(FaultPlan::none().is_empty() && !FaultPlan::none().refuse(Phase::Load, 1).is_empty());
    }
}

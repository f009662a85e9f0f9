//! Output that several commands share.

use bursar::{AttemptReport, Outcome};
use bursar_budgets::grouped;
use serde_json::{Value, json};

use crate::failure::Failure;

/// Returns a failure as a JSON object.
pub fn failure(failure: &Failure) -> Value {
    let (error, hint) = failure.error_and_hint();
    json!({ "type": "error", "error": error, "hint": hint })
}

/// Prints one line per attempt.
pub fn attempts(attempts: &[AttemptReport]) {
    for AttemptReport { attempt, target_tokens, phase, outcome } in attempts {
        let came = match outcome {
            Outcome::Ready => "ready".to_owned(),
            Outcome::Refused { evidence } => evidence.to_string(),
            Outcome::Died { message } | Outcome::Failed { message } => format!("ended in phase {phase}: {message}"),
        };
        println!("attempt {attempt}, KV cache of {} tokens: {came}", grouped(*target_tokens as u64));
    }
}

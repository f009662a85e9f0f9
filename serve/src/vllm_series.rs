//! Bursar's metrics under vLLM's names, for dashboards and autoscalers that read these names.
//!
//! Names and labels match vLLM 0.33 (`vllm/v1/metrics/loggers.py`).

use std::collections::BTreeMap;

/// Series that vLLM has under another name: Bursar's name, vLLM's name, and the type.
const RENAMED: [(&str, &str, &str); 23] = [
    ("bursar_sequences_running", "num_requests_running", "gauge"),
    ("bursar_sequences_waiting", "num_requests_waiting", "gauge"),
    ("bursar_asleep", "engine_sleeping", "gauge"),
    ("bursar_prompt_tokens_total", "prompt_tokens_total", "counter"),
    ("bursar_cached_prompt_tokens_total", "prompt_tokens_cached_total", "counter"),
    ("bursar_generated_tokens_total", "generation_tokens_total", "counter"),
    ("bursar_draft_tokens_total", "spec_decode_num_draft_tokens_total", "counter"),
    ("bursar_draft_tokens_accepted_total", "spec_decode_num_accepted_tokens_per_pos_total", "counter"),
    ("bursar_prefix_cache_queries_total", "prefix_cache_queries_total", "counter"),
    ("bursar_prefix_cache_hits_total", "prefix_cache_hits_total", "counter"),
    ("bursar_encoder_cache_queries_total", "mm_cache_queries_total", "counter"),
    ("bursar_encoder_cache_hits_total", "mm_cache_hits_total", "counter"),
    ("bursar_time_to_first_token_seconds", "time_to_first_token_seconds", "histogram"),
    ("bursar_token_interval_seconds", "inter_token_latency_seconds", "histogram"),
    // Earlier versions of vLLM used this name, and older dashboards still read it.
    ("bursar_token_interval_seconds", "time_per_output_token_seconds", "histogram"),
    ("bursar_request_seconds", "e2e_request_latency_seconds", "histogram"),
    ("bursar_queue_seconds", "request_queue_time_seconds", "histogram"),
    ("bursar_prefill_seconds", "request_prefill_time_seconds", "histogram"),
    ("bursar_decode_seconds", "request_decode_time_seconds", "histogram"),
    ("bursar_request_prompt_tokens", "request_prompt_tokens", "histogram"),
    ("bursar_request_generated_tokens", "request_generation_tokens", "histogram"),
    ("bursar_request_generated_tokens", "request_max_num_generation_tokens", "histogram"),
    ("bursar_step_tokens", "iteration_tokens_total", "histogram"),
];

/// Appends vLLM's series to the text of Bursar's metrics.
pub(super) fn with_vllm_names(ours: String) -> String {
    let series: Vec<Series<'_>> = ours.lines().filter_map(Series::read).collect();
    let mut text = String::new();
    for (name, theirs, kind) in RENAMED {
        let is_it = |series: &&Series<'_>| match series.name.strip_prefix(name) {
            Some("") => kind != "histogram",
            Some("_bucket" | "_sum" | "_count") => kind == "histogram",
            _ => false,
        };
        let lines = series.iter().filter(is_it).map(|series| {
            let part = &series.name[name.len()..];
            (format!("vllm:{theirs}{part}"), series.labels_as_theirs(), series.value.to_owned())
        });
        write_series(&mut text, theirs, kind, lines);
    }
    let shares = shares(&series);
    write_series(&mut text, "kv_cache_usage_perc", "gauge", shares.into_iter());
    let preempted = sums(&series, "bursar_preemptions_total", |_| Some(String::new()));
    let preempted = preempted
        .into_iter()
        .map(|((model, _), count)| ("vllm:num_preemptions_total".to_owned(), labels_of(&model), count.to_string()));
    write_series(&mut text, "num_preemptions_total", "counter", preempted);
    let ended = sums(&series, "bursar_requests_total", |reason| finished(reason).map(str::to_owned));
    let ended = ended.into_iter().map(|((model, reason), count)| {
        let labels = format!("{},finished_reason=\"{reason}\"", labels_of(&model));
        ("vllm:request_success_total".to_owned(), labels, count.to_string())
    });
    write_series(&mut text, "request_success_total", "counter", ended);
    ours + &text
}

fn write_series(text: &mut String, name: &str, kind: &str, lines: impl Iterator<Item = (String, String, String)>) {
    let mut lines = lines.peekable();
    if lines.peek().is_some() {
        *text += &format!("# TYPE vllm:{name} {kind}\n");
    }
    for (name, labels, value) in lines {
        *text += &format!("{name}{{{labels}}} {value}\n");
    }
}

/// Returns vLLM's `finished_reason` of a request. Returns `None` for requests that vLLM
/// would not count.
fn finished(reason: &str) -> Option<&'static str> {
    match reason {
        "stop" => Some("stop"),
        "length" => Some("length"),
        "cancelled" => Some("abort"),
        "refused" | "overloaded" => None,
        _ => Some("error"),
    }
}

/// A line of the Prometheus text format.
struct Series<'a> {
    name: &'a str,
    labels: &'a str,
    value: &'a str,
}

impl<'a> Series<'a> {
    fn read(line: &'a str) -> Option<Self> {
        let (name, rest) = line.split_once('{').filter(|_| !line.starts_with('#'))?;
        let (labels, value) = rest.rsplit_once("} ")?;
        Some(Series { name, labels, value })
    }

    /// Returns the value of a label. Model names contain no quotes, so values are not unescaped.
    fn label(&self, name: &str) -> Option<&'a str> {
        let at = self.labels.split(',').find_map(|label| label.strip_prefix(name)?.strip_prefix("=\""))?;
        at.strip_suffix('"')
    }

    /// Returns vLLM's labels. A histogram bucket also keeps its upper bound (`le`), and a counter
    /// of accepted drafts keeps their `position`.
    fn labels_as_theirs(&self) -> String {
        let labels = labels_of(self.label("model").unwrap_or_default());
        let kept = ["le", "position"].into_iter().find_map(|name| Some((name, self.label(name)?)));
        match kept {
            Some((name, value)) => format!("{labels},{name}=\"{value}\""),
            None => labels,
        }
    }
}

fn labels_of(model: &str) -> String {
    format!("model_name=\"{model}\",engine=\"0\"")
}

/// Returns, for each model, the fraction of its KV blocks that is in use.
fn shares(series: &[Series<'_>]) -> Vec<(String, String, String)> {
    let number = |name: &str, model: &str| {
        let found = series.iter().find(|series| series.name == name && series.label("model") == Some(model))?;
        found.value.parse::<f64>().ok()
    };
    let models =
        series.iter().filter(|series| series.name == "bursar_kv_blocks").filter_map(|series| series.label("model"));
    let share = |model: &str| {
        let (used, all) = (number("bursar_kv_blocks_used", model)?, number("bursar_kv_blocks", model)?);
        let share = if all > 0.0 { used / all } else { 0.0 };
        Some(("vllm:kv_cache_usage_perc".to_owned(), labels_of(model), share.to_string()))
    };
    models.filter_map(share).collect()
}

/// Sums a counter by model and by the group that `group` assigns to its `reason`. Reasons without a
/// group are left out.
fn sums(series: &[Series<'_>], name: &str, group: impl Fn(&str) -> Option<String>) -> BTreeMap<(String, String), u64> {
    let mut sums = BTreeMap::new();
    for series in series.iter().filter(|series| series.name == name) {
        let (Some(model), Some(reason)) = (series.label("model"), series.label("reason")) else { continue };
        if let (Some(group), Ok(count)) = (group(reason), series.value.parse::<u64>()) {
            *sums.entry((model.to_owned(), group)).or_default() += count;
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_repeated_under_vllm_names() {
        let ours = "# TYPE bursar_sequences_running gauge\nbursar_sequences_running{model=\"a\"} 3\n\
                    bursar_kv_blocks{model=\"a\"} 8\nbursar_kv_blocks_used{model=\"a\"} 2\n\
                    bursar_time_to_first_token_seconds_bucket{model=\"a\",le=\"0.5\"} 4\n\
                    bursar_time_to_first_token_seconds_sum{model=\"a\"} 1.5\n\
                    bursar_requests_total{model=\"a\",reason=\"stop\"} 5\n\
                    bursar_requests_total{model=\"a\",reason=\"given_up\"} 1\n\
                    bursar_requests_total{model=\"a\",reason=\"refused\"} 9\n\
                    bursar_preemptions_total{model=\"a\",reason=\"blocks\"} 1\n\
                    bursar_preemptions_total{model=\"a\",reason=\"shrink\"} 2\n";
        let series = with_vllm_names(ours.to_owned());
        assert!(series.starts_with(ours));
        for line in [
            "# TYPE vllm:num_requests_running gauge",
            "vllm:num_requests_running{model_name=\"a\",engine=\"0\"} 3",
            "vllm:kv_cache_usage_perc{model_name=\"a\",engine=\"0\"} 0.25",
            "# TYPE vllm:time_to_first_token_seconds histogram",
            "vllm:time_to_first_token_seconds_bucket{model_name=\"a\",engine=\"0\",le=\"0.5\"} 4",
            "vllm:time_to_first_token_seconds_sum{model_name=\"a\",engine=\"0\"} 1.5",
            "vllm:request_success_total{model_name=\"a\",engine=\"0\",finished_reason=\"stop\"} 5",
            "vllm:request_success_total{model_name=\"a\",engine=\"0\",finished_reason=\"error\"} 1",
            "vllm:num_preemptions_total{model_name=\"a\",engine=\"0\"} 3",
        ] {
            assert!(series.lines().any(|other| other == line), "{line}\n{series}");
        }
        assert!(!series.contains(" 9\nvllm") && !series.contains("\"refused\"} 9\nvllm"), "{series}");
    }
}

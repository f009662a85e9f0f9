//! The table of metrics. `docs/metrics.md` has the same rows, and says what to watch.

use bursar_budgets::{Class, Label, Refusal};

use super::{
    Architecture, AttemptEnd, Build, CacheGroupIndex, Counter, DeviceLabel, Direction, DraftPosition, Dtype, Gauge,
    GroupLabel, Histogram, HttpError, HttpStatus, KvCacheDtype, Late, Permit, Preempted, Quantization, RequestEnd,
    Route, Row, SleepReason, Version, WakeReason,
};
use crate::{deadline::Deadline, phase::Phase, tenant::Tenant, tree::Role};

macro_rules! table {
    ($($item:ident: $kind:ident<$labels:ty> = $name:literal, $help:literal $(, $buckets:expr)?;)*) => {
        $(
            #[doc = concat!("`", $name, "`: ", $help)]
            pub const $item: $kind<$labels> = {
                let buckets: &[f64] = &[];
                $(let buckets: &[f64] = { let _ = buckets; $buckets };)?
                $kind::new($name, $help, buckets)
            };
        )*

        pub const TABLE: &[Row] = &[$(*$item.row()),*];
    };
}

/// Edges for the time to the first token: the edges of vLLM (`vllm/v1/metrics/loggers.py`), so that
/// vLLM's dashboards work with Bursar.
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
/// Edges for the interval between tokens: vLLM's edges, and finer edges below them, because a step
/// may take only 4 ms.
const BETWEEN_TOKENS: &[f64] = &[
    0.001, 0.002, 0.003, 0.004, 0.005, 0.0065, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
/// Edges for whole requests: vLLM's edges, and finer edges below them, because most requests wait
/// for one step at most.
const REQUEST: &[f64] = &[
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
    50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];
/// Edges for the length of a prompt or reply in tokens: 1, 2 and 5 times each power of ten, as in
/// vLLM, up to one million.
const LENGTH: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];
/// Edges for the tokens of a step: vLLM's edges (`iteration_tokens_total`), and finer edges for
/// decode batches.
const STEP_SIZE: &[f64] =
    &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0];
/// Edges for the duration of a step, from 1 ms for decoding with a small model to seconds for a
/// full prompt on a CPU.
const STEP: &[f64] = &[
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2,
    0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
];
/// Edges for the duration of a shrink, from waiting for the end of a step to unbacking the memory
/// of a whole GPU.
const SHRINK: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
/// Edges for the duration of block copies, from one block of a small model to a gigabyte over a
/// slow bus.
const COPY: &[f64] = &[0.00001, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5];
/// Edges for the duration of a wake-up, from copying a small model back to loading a large model
/// from its files.
const WAKE: &[f64] = &[0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];
/// Edges for the wait for a lease, from an immediate grant to a grant after up to an hour, when
/// another lease has ended.
const LEASE: &[f64] = &[0.0001, 0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 3600.0];

table! {
    BUILD_INFO: Gauge<(Version, Build)> = "bursar_build_info", "Always 1. The labels name the version and build.";
    MODEL_INFO: Gauge<(Label, Architecture, Dtype, Quantization, KvCacheDtype)> = "bursar_model_info", "1 for a model that has been ready and has not been unloaded since, even if it is not ready now.";
    PROCESS_START_TIME_SECONDS: Gauge<()> = "process_start_time_seconds", "Start time of the process, in seconds since 1970.";
    PROCESS_CPU_SECONDS_TOTAL: Counter<()> = "process_cpu_seconds_total", "CPU time used, in whole seconds.";
    PROCESS_RESIDENT_MEMORY_BYTES: Gauge<()> = "process_resident_memory_bytes", "Host memory in use.";
    PROCESS_VIRTUAL_MEMORY_BYTES: Gauge<()> = "process_virtual_memory_bytes", "Reserved address space, most of it not backed by memory.";
    PROCESS_OPEN_FDS: Gauge<()> = "process_open_fds", "Open files and connections.";
    PROCESS_MAX_FDS: Gauge<()> = "process_max_fds", "The limit on open files and connections.";
    DEVICE_TOTAL_BYTES: Gauge<DeviceLabel> = "bursar_device_total_bytes", "The device's memory, as its driver reports it.";
    DEVICE_FREE_BYTES: Gauge<DeviceLabel> = "bursar_device_free_bytes", "Device memory that no process uses, as its driver reports it.";
    OVERHEAD_BYTES: Gauge<DeviceLabel> = "bursar_overhead_bytes", "Device memory of this process that no lease can hold: context, loaded modules, library handles.";
    FOREIGN_BYTES: Gauge<DeviceLabel> = "bursar_foreign_bytes", "Device memory that other processes hold.";
    DRIFT_BYTES: Gauge<DeviceLabel> = "bursar_drift_bytes", "Device memory that this process holds outside leases and overhead. It must be 0.";
    CARD_TOTAL_BYTES: Gauge<(GroupLabel, DeviceLabel)> = "bursar_card_total_bytes", "Memory of one device of a group, as its driver reports it.";
    CARD_FREE_BYTES: Gauge<(GroupLabel, DeviceLabel)> = "bursar_card_free_bytes", "Memory of one device of a group that no process uses, as its driver reports it.";
    CARD_OVERHEAD_BYTES: Gauge<(GroupLabel, DeviceLabel)> = "bursar_card_overhead_bytes", "Memory of one device of a group that this process holds and no lease can hold.";
    CARD_BACKED_BYTES: Gauge<(GroupLabel, DeviceLabel)> = "bursar_card_backed_bytes", "Memory of one device of a group that leases use.";
    CARD_FOREIGN_BYTES: Gauge<(GroupLabel, DeviceLabel)> = "bursar_card_foreign_bytes", "Memory of one device of a group that other processes hold.";
    CARD_DRIFT_BYTES: Gauge<(GroupLabel, DeviceLabel)> = "bursar_card_drift_bytes", "Memory of one device of a group that this process holds outside leases and overhead. It must be 0.";
    OWED_BYTES: Gauge<DeviceLabel> = "bursar_owed_bytes", "Bytes that leases must still give up before all leases and the canary fit next to other processes.";
    DEFICIT_BYTES: Gauge<DeviceLabel> = "bursar_deficit_bytes", "Bytes by which leases, overhead and other processes exceed the device. Nothing is granted until it is 0.";
    CANARY_BYTES: Gauge<DeviceLabel> = "bursar_canary_bytes", "Size of the canary now: bytes kept free for other processes.";
    CANARY_WANTED_BYTES: Gauge<DeviceLabel> = "bursar_canary_wanted_bytes", "Full size of the canary, in bytes.";
    CANARY_GIVEN_TOTAL: Counter<DeviceLabel> = "bursar_canary_given_total", "Times that part of the canary was given up.";
    RUNTIME_UP: Gauge<DeviceLabel> = "bursar_runtime_up", "1 while a runtime is on the device, 0 once it has ended.";
    BUDGET_UP: Gauge<DeviceLabel> = "bursar_budget_up", "1 while the device's budget actor runs, 0 while it does not.";
    BUDGET_RESTARTS_TOTAL: Counter<DeviceLabel> = "bursar_budget_restarts_total", "Restarts of the device's budget actor after it died.";
    DEVICE_LOSSES_TOTAL: Counter<DeviceLabel> = "bursar_device_losses_total", "Times that the device was lost.";
    LEASE_BYTES: Gauge<(DeviceLabel, Label, Class)> = "bursar_lease_bytes", "Bytes leased now; 0 once the lease has ended.";
    LEASE_PEAK_BYTES: Gauge<(DeviceLabel, Label, Class)> = "bursar_lease_peak_bytes", "Maximum bytes leased at once so far.";
    LEASE_USED_BYTES: Gauge<(DeviceLabel, Label, Class)> = "bursar_lease_used_bytes", "Leased device memory in use: backed, or allocated by the lease's owner itself.";
    LEASES_WAITING: Gauge<DeviceLabel> = "bursar_leases_waiting", "Requests for leases that wait for memory.";
    LEASE_WAIT_SECONDS: Histogram<(DeviceLabel, Class)> = "bursar_lease_wait_seconds", "Time that a request for a lease, or for a larger one, waited until it was granted.", LEASE;
    LEASES_REFUSED_TOTAL: Counter<(DeviceLabel, Class, Refusal)> = "bursar_leases_refused_total", "Requests for leases that were refused, or that the caller withdrew (`withdrawn`).";
    HOST_TOTAL_BYTES: Gauge<DeviceLabel> = "bursar_host_total_bytes", "Host memory that may be leased.";
    HOST_LEASED_BYTES: Gauge<DeviceLabel> = "bursar_host_leased_bytes", "Host memory leased now.";
    PERMITS: Gauge<(Label, Permit)> = "bursar_permits", "Maximum that the profile allows to run at once: sequences in a step, patches in a vision batch.";
    PERMITS_USED: Gauge<(Label, Permit)> = "bursar_permits_used", "Permits in use: sequences that run, and patches of the vision batch that runs.";
    KV_BLOCKS: Gauge<Label> = "bursar_kv_blocks", "Blocks of the KV cache that sequences may use.";
    KV_BORROWED_BYTES: Gauge<Label> = "bursar_kv_borrowed_bytes", "Bytes of the KV cache beyond the model's share, lent by idle models.";
    KV_BLOCKS_USED: Gauge<Label> = "bursar_kv_blocks_used", "Blocks that sequences hold.";
    KV_GROUP_BLOCKS: Gauge<(Label, CacheGroupIndex)> = "bursar_kv_group_blocks", "Blocks in the block tables of all sequences, by cache group. A block that several sequences share counts once for each. Only for models with several groups.";
    KV_BLOCKS_CACHED: Gauge<Label> = "bursar_kv_blocks_cached", "Blocks that no sequence holds and that other prompts can reuse.";
    KV_BLOCKS_SWAPPED: Gauge<Label> = "bursar_kv_blocks_swapped", "Blocks whose content is in host memory (`swap_space`), whether or not the device also has them.";
    KV_BLOCK_TOKENS: Gauge<Label> = "bursar_kv_block_tokens", "Tokens per block.";
    KV_SHRINKS_TOTAL: Counter<Label> = "bursar_kv_shrinks_total", "Times that the KV cache began to shrink.";
    KV_GROWTHS_TOTAL: Counter<Label> = "bursar_kv_growths_total", "Times that the KV cache grew.";
    KV_SHRINK_SECONDS: Histogram<Label> = "bursar_kv_shrink_seconds", "Time from the order to shrink until the lease is smaller.", SHRINK;
    PREFIX_CACHE_QUERIES_TOTAL: Counter<Label> = "bursar_prefix_cache_queries_total", "Tokens of starting sequences that were looked up in the prefix cache.";
    PREFIX_CACHE_HITS_TOTAL: Counter<Label> = "bursar_prefix_cache_hits_total", "Tokens of starting sequences that were found in the prefix cache and therefore not computed.";
    PREFIX_CACHE_HOST_HITS_TOTAL: Counter<Label> = "bursar_prefix_cache_host_hits_total", "Tokens whose KV blocks were copied back from host memory instead of being computed, for starting and preempted sequences.";
    STATE_COPIED_BYTES_TOTAL: Counter<(Label, Direction)> = "bursar_state_copied_bytes_total", "Bytes of snapshots of recurrent states copied to host memory and back.";
    KV_COPIED_BYTES_TOTAL: Counter<(Label, Direction)> = "bursar_kv_copied_bytes_total", "Bytes of KV blocks copied to host memory and back.";
    KV_COPY_SECONDS: Histogram<Label> = "bursar_kv_copy_seconds", "Device time for KV block copies that were requested together.", COPY;
    PREFIX_CACHE_BYTES: Gauge<Label> = "bursar_prefix_cache_bytes", "Bytes of KV blocks that no sequence holds and that other prompts can reuse.";
    STATE_SLOTS: Gauge<Label> = "bursar_state_slots", "Slots for recurrent states. Only for models with layers that have such states.";
    STATE_SLOTS_USED: Gauge<Label> = "bursar_state_slots_used", "Slots of recurrent states that running sequences hold, one each.";
    STATE_SNAPSHOTS: Gauge<Label> = "bursar_state_snapshots", "Slots of recurrent states with a snapshot that other prompts can resume from.";
    STATE_SNAPSHOTS_SWAPPED: Gauge<Label> = "bursar_state_snapshots_swapped", "Snapshots of recurrent states in host memory.";
    ENCODER_CACHE_QUERIES_TOTAL: Counter<Label> = "bursar_encoder_cache_queries_total", "Pictures whose embeddings a request needed.";
    ENCODER_CACHE_HITS_TOTAL: Counter<Label> = "bursar_encoder_cache_hits_total", "Pictures whose embeddings were in the cache, or were being computed for another request.";
    ENCODER_CACHE_HOST_HITS_TOTAL: Counter<Label> = "bursar_encoder_cache_host_hits_total", "Hits whose embeddings were copied back from host memory.";
    ENCODER_CACHE_HOST_BYTES: Gauge<Label> = "bursar_encoder_cache_host_bytes", "Bytes of embeddings in host memory (`swap_space`), whether or not the device also has them.";
    ENCODER_CACHE_BYTES: Gauge<Label> = "bursar_encoder_cache_bytes", "Bytes of embeddings in the cache.";
    ENCODER_CACHE_PICTURES: Gauge<Label> = "bursar_encoder_cache_pictures", "Pictures whose embeddings are in the cache, or being computed.";
    PICTURES_FOUND_COMPUTED_TOTAL: Counter<Label> = "bursar_pictures_found_computed_total", "Pictures that were neither decoded nor encoded, because the prefix cache held their tokens.";
    PICTURES_WANTED_AGAIN_TOTAL: Counter<Label> = "bursar_pictures_wanted_again_total", "Times that a sequence had to request its pictures again, because it lost their blocks or no longer found them in the prefix cache.";
    EXPERT_IMBALANCE: Gauge<Label> = "bursar_expert_imbalance", "Load of the busiest expert divided by the average load, in the most uneven layer, during the last second of steps. 0 before the first such second, and for models without experts.";
    PLAN_ERROR_BYTES: Gauge<(Label, Class)> = "bursar_plan_error_bytes", "The measured workspace minus the planned one. It must be 0.";
    PROFILE_ATTEMPTS_TOTAL: Counter<(Label, AttemptEnd)> = "bursar_profile_attempts_total", "Attempts to start a model, by outcome.";
    PROFILE_SECONDS: Gauge<Label> = "bursar_profile_seconds", "Duration of the last successful attempt, including loading.";
    PROFILE_TARGET_TOKENS: Gauge<Label> = "bursar_profile_target_tokens", "Size of the KV cache that the last attempt settled on, in tokens.";
    OOM_TOTAL: Counter<(Label, Phase)> = "bursar_oom_total", "Times that memory was refused, by phase.";
    ACTOR_UP: Gauge<(Label, Role)> = "bursar_actor_up", "1 while the model's actor runs, 0 while it does not.";
    RESTARTS_TOTAL: Counter<(Label, Role)> = "bursar_restarts_total", "Deaths of an actor after which the supervisor had to restart it.";
    ASLEEP: Gauge<Label> = "bursar_asleep", "1 while the model sleeps and holds no device memory.";
    SLEEPS_TOTAL: Counter<(Label, SleepReason)> = "bursar_sleeps_total", "Times that the model was put to sleep, by reason.";
    WAKES_TOTAL: Counter<(Label, WakeReason)> = "bursar_wakes_total", "Times that the model woke up, by reason.";
    WAKE_SECONDS: Histogram<Label> = "bursar_wake_seconds", "Time from the order to wake a model until it accepts requests, including the wait for memory.", WAKE;
    SEQUENCES_RUNNING: Gauge<Label> = "bursar_sequences_running", "Sequences that hold blocks and are being computed.";
    SEQUENCES_WAITING: Gauge<Label> = "bursar_sequences_waiting", "Sequences that wait to be computed.";
    STEPS_UNDER_WAY: Gauge<Label> = "bursar_steps_under_way", "Steps submitted to the step lane, at most two.";
    REQUESTS_TOTAL: Counter<(Label, RequestEnd)> = "bursar_requests_total", "Requests that ended, by outcome.";
    REQUESTS_ACTIVE: Gauge<Label> = "bursar_requests_active", "Requests that were accepted and have not ended.";
    REQUESTS_REDONE_TOTAL: Counter<Label> = "bursar_requests_redone_total", "Times that a request was started again because actors died.";
    DEADLINES_MISSED_TOTAL: Counter<(Label, Deadline)> = "bursar_deadlines_missed_total", "Requests that ended because a deadline was missed or could no longer be met, by deadline.";
    PREEMPTIONS_TOTAL: Counter<(Label, Preempted)> = "bursar_preemptions_total", "Times that a sequence lost its blocks before it ended.";
    PROMPT_TOKENS_TOTAL: Counter<Label> = "bursar_prompt_tokens_total", "Prompt tokens, computed or found in the prefix cache.";
    CACHED_PROMPT_TOKENS_TOTAL: Counter<Label> = "bursar_cached_prompt_tokens_total", "Prompt tokens found in the prefix cache and therefore not computed.";
    GENERATED_TOKENS_TOTAL: Counter<Label> = "bursar_generated_tokens_total", "Tokens of replies.";
    DRAFT_TOKENS_TOTAL: Counter<Label> = "bursar_draft_tokens_total", "Drafted tokens that steps have verified.";
    DRAFT_TOKENS_ACCEPTED_TOTAL: Counter<(Label, DraftPosition)> = "bursar_draft_tokens_accepted_total", "Drafted tokens that were accepted, by their position among the drafts of a step, from 0.";
    TENANT_TOKENS_TOTAL: Counter<(Label, Tenant)> = "bursar_tenant_tokens_total", "Prompt and reply tokens computed for each tenant in `tenant_weights`, and for all `other` tenants. Stays 0 without weights.";
    TIME_TO_FIRST_TOKEN_SECONDS: Histogram<Label> = "bursar_time_to_first_token_seconds", "Time from the request to the first token of its reply.", FIRST_TOKEN;
    TOKEN_INTERVAL_SECONDS: Histogram<Label> = "bursar_token_interval_seconds", "Time from one token of a reply to the next.", BETWEEN_TOKENS;
    TOKEN_INTERVAL_MISSED_TOTAL: Counter<(Label, Late)> = "bursar_token_interval_missed_total", "Tokens whose interval after the previous token exceeded the target (`token_interval`), by reason.";
    QUEUE_SECONDS: Histogram<Label> = "bursar_queue_seconds", "Time from when the scheduler gets a request to its first step.", REQUEST;
    REQUEST_SECONDS: Histogram<Label> = "bursar_request_seconds", "Time from the request to the end of its reply, for completed requests.", REQUEST;
    PREFILL_SECONDS: Histogram<Label> = "bursar_prefill_seconds", "Time from the first step of a request to the first token of its reply, for completed requests.", REQUEST;
    DECODE_SECONDS: Histogram<Label> = "bursar_decode_seconds", "Time from the first token of a reply to its last, for completed requests.", REQUEST;
    REQUEST_PROMPT_TOKENS: Histogram<Label> = "bursar_request_prompt_tokens", "Prompt length of completed requests, in tokens.", LENGTH;
    REQUEST_GENERATED_TOKENS: Histogram<Label> = "bursar_request_generated_tokens", "Reply length of completed requests, in tokens.", LENGTH;
    REPLY_PREDICTION_ERROR_TOKENS: Histogram<Label> = "bursar_reply_prediction_error_tokens", "Difference between a reply's length and the length predicted when it was admitted, in tokens.", LENGTH;
    GRAPH_REPLAYS_TOTAL: Counter<Label> = "bursar_graph_replays_total", "Steps that ran as a captured graph.";
    EAGER_STEPS_TOTAL: Counter<Label> = "bursar_eager_steps_total", "Steps that ran without a captured graph, launch by launch.";
    GRAPHS_CAPTURED: Gauge<Label> = "bursar_graphs_captured", "Sizes of decode steps captured as graphs.";
    GRAPHS_NOT_RECAPTURED_TOTAL: Counter<Label> = "bursar_graphs_not_recaptured_total", "Restarted lanes that could not capture all sizes again. Decode steps of the other sizes run launch by launch.";
    STEP_SECONDS: Histogram<Label> = "bursar_step_seconds", "Duration of a step, from launch to result. A step launched while another ran counts from the end of that step.", STEP;
    STEP_TOKENS: Histogram<Label> = "bursar_step_tokens", "Tokens that a step computed, for prompts and replies.", STEP_SIZE;
    HTTP_REQUESTS_TOTAL: Counter<(Route, HttpStatus)> = "bursar_http_requests_total", "HTTP requests that `bursar serve` answered, by route and status. The status is 0 if the client disconnected before the response.";
    HTTP_ERRORS_TOTAL: Counter<HttpError> = "bursar_http_errors_total", "HTTP requests that were refused or failed, by the `code` of the error, or its `type`.";
    HTTP_CONNECTIONS: Gauge<()> = "bursar_http_connections", "Open connections of `bursar serve`.";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::metric::Kind;

    #[test]
    fn metric_names_follow_prometheus_conventions() {
        let names: BTreeSet<_> = TABLE.iter().map(|row| row.name).collect();
        assert_eq!(names.len(), TABLE.len(), "each name is listed once");
        for Row { name, kind, labels, help, buckets, .. } in TABLE {
            assert!(["bursar_", "process_"].iter().any(|prefix| name.starts_with(prefix)), "{name}");
            assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
            assert_eq!(name.ends_with("_total"), *kind == Kind::Counter, "{name} is declared as {}", kind.name());
            assert_eq!(!buckets.is_empty(), *kind == Kind::Histogram, "{name}");
            let has_unit = ["_seconds", "_tokens"].iter().any(|unit| name.ends_with(unit));
            assert!(has_unit || *kind != Kind::Histogram, "{name} has a unit in its name");
            assert!(help.ends_with('.') && !help.contains('\n'), "the help text of {name} is a sentence on one line");
            let known = [
                "device",
                "group",
                "model",
                "class",
                "phase",
                "reason",
                "actor",
                "permit",
                "tenant",
                "direction",
                "position",
                "cache_group",
                "route",
                "status",
                "code",
            ];
            let of_info = ["version", "build", "architecture", "dtype", "quantization", "kv_cache_dtype"];
            let is_known = |label: &&str| known.contains(label) || name.ends_with("_info") && of_info.contains(label);
            assert!(labels.iter().all(is_known), "{name}: {labels:?}");
        }
    }

    #[test]
    fn histogram_edges_increase_and_include_those_of_vllm() {
        for Row { name, buckets, .. } in TABLE {
            assert!(buckets.is_sorted_by(|edge, next| edge < next), "{name}: {buckets:?}");
        }
        // vLLM's edges, from `vllm/v1/metrics/loggers.py`.
        let between =
            [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
        let request = [
            0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
            960.0, 1920.0, 7680.0,
        ];
        let has = |row: &Row, edges: &[f64]| edges.iter().all(|edge| row.buckets.contains(edge));
        assert!(has(TOKEN_INTERVAL_SECONDS.row(), &between));
        assert!(has(QUEUE_SECONDS.row(), &request) && has(REQUEST_SECONDS.row(), &request));
        assert_eq!(TIME_TO_FIRST_TOKEN_SECONDS.row().buckets.len(), 22, "the buckets of vLLM start at 1 ms already");
    }
}

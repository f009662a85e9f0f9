//! Draft heads: Qwen3.5's (MTP), EAGLE-3 and Gemma 4 assistants. Drafts are compared with heads built from the layers of
//! transformers, also in chunks and on several ranks. Checkpoints whose head is missing or broken are refused.

use std::sync::Arc;

use bursar_budgets::{Bytes, Hint};
use bursar_kernels::{Backend, CudaTarget, DType, Rank, Target};
use bursar_model::{
    LoadError, Model,
    blocks::ConfigError,
    checkpoint::{Checkpoint, CheckpointSource, DraftProjection},
    flow::CacheFormat,
    registry::{random_checkpoint, shape_settings, shapes, without_weights},
    weights::WeightError,
};
use serde_json::{Value, json};

use crate::{
    bench::{
        Bench, BenchMemory, Case, Memory, encode, on_ranks, open, open_random, open_with_head, relative_error,
        repository,
    },
    copy::Copy,
};

const QWEN3_5: &str = "tests/golden/qwen3_5";
/// Qwen3.5 with experts in the decoder and in the draft head.
const QWEN3_5_MOE: &str = "tests/golden/qwen3_5_moe";
/// An EAGLE-3 head with a reduced vocabulary, and one with a separate embedding, rows of another width
/// than the decoder's, biases and pictures.
const EAGLE3: &str = "tests/golden/eagle3";
const EAGLE3_VL: &str = "tests/golden/eagle3_vl";
/// An assistant that chooses among clusters of tokens, and one for a model with pictures.
const ASSISTANT: &str = "tests/golden/gemma4_assistant";
const ASSISTANT_TARGET: &str = "tests/golden/gemma4_sharing";
const ASSISTANT_VL: &str = "tests/golden/gemma4_assistant_vl";
const CPU: Target = Target::Cpu { threads: 1 };
/// Tokens after the prompt whose drafts are recorded.
const ANSWER: usize = 7;
/// The same tolerances as for the decoder; see `golden_text_families.rs`.
const REFERENCE_TOLERANCE: f32 = 1e-4;
const NOISE_TOLERANCE: f32 = 3e-5;

/// The cases with recorded drafts.
const CASES: [(&str, &str); 13] = [
    (QWEN3_5, "single_image"),
    (QWEN3_5, "two_turns"),
    (QWEN3_5, "tokens_65"),
    (QWEN3_5_MOE, "single_image"),
    (QWEN3_5_MOE, "short"),
    (EAGLE3, "short"),
    (EAGLE3, "long"),
    (EAGLE3_VL, "single_image"),
    (EAGLE3_VL, "two_turns"),
    (ASSISTANT, "short"),
    (ASSISTANT, "long"),
    (ASSISTANT_VL, "one_image"),
    (ASSISTANT_VL, "two_turns"),
];

/// Logits of the draft head.
struct Drafts {
    /// Logits for the last token of each chunk and for each token of the answer, with its position.
    rows: Vec<(usize, Vec<f32>)>,
    /// Logits for three drafts after the prompt.
    drafts: Vec<Vec<f32>>,
    /// The tokens of these drafts.
    tokens: Vec<u32>,
}

/// Runs a prompt in chunks of these sizes, repeated, and the start of the recorded answer.
fn run(bench: &Bench<impl Backend>, case: &Case, picture_rows: &[Vec<u32>], sizes: &[usize]) -> Drafts {
    let mut sequence = bench.sequence(case, picture_rows);
    let (mut rows, mut drafts, mut tokens, mut end) = (Vec::new(), Vec::new(), Vec::new(), 0);
    let mut sizes = sizes.iter().cycle();
    while sequence.prompt_left() > 0 {
        let left = sequence.prompt_left();
        let chunk = sequence.next_chunk((*sizes.next().expect("the cycle is endless")).min(left));
        let is_last = chunk.token_count() == left;
        end += chunk.token_count();
        let mut drafted = bench.step_and_draft(&mut [chunk], if is_last { 3 } else { 1 });
        if is_last {
            drafts = drafted.drafts.iter().map(|draft| draft[0].clone()).collect();
            tokens = drafted.tokens.concat();
        }
        rows.push((end - 1, drafted.drafts.remove(0).remove(0)));
    }
    for token in &case.greedy_tokens()[..ANSWER] {
        sequence.push(*token);
        let mut drafted = bench.step_and_draft(&mut [sequence.next_chunk(1)], 1);
        rows.push((end, drafted.drafts.remove(0).remove(0)));
        end += 1;
    }
    bench.end(sequence);
    Drafts { rows, drafts, tokens }
}

/// Compares drafts with the recorded ones. Returns the number of compared rows.
fn assert_recorded(case: &Case, found: &Drafts, what: &str) -> usize {
    let recorded = case.logits("draft_positions", "draft_logits");
    let expected = |position: usize| recorded.iter().find(|(other, _)| *other == position).map(|(_, logits)| logits);
    let rows = found.rows.iter().filter_map(|(position, logits)| Some((position, logits, expected(*position)?)));
    let errors: Vec<_> =
        rows.map(|(position, logits, expected)| (position, relative_error(logits, expected))).collect();
    for (position, error) in &errors {
        assert!(
            *error <= REFERENCE_TOLERANCE,
            "{} {what}: drafts after token {position} differ by {error:e}",
            case.name
        );
    }
    let tokens: Vec<i64> = found.tokens.iter().copied().map(i64::from).collect();
    assert_eq!(Some(tokens), case.integers("drafted_tokens"), "{} {what}", case.name);
    let error = relative_error(&found.drafts.concat(), &case.floats("drafted_logits").expect("recorded drafts"));
    assert!(error <= REFERENCE_TOLERANCE, "{} {what}: further drafts differ by {error:e}", case.name);
    errors.len()
}

/// The largest difference of the rows that both runs have.
fn difference(found: &Drafts, expected: &Drafts) -> f32 {
    let drafts = relative_error(&found.drafts.concat(), &expected.drafts.concat());
    let same = found.rows.iter().flat_map(|(position, logits)| {
        expected.rows.iter().filter(move |(other, _)| other == position).map(move |(_, other)| (logits, other))
    });
    same.map(|(one, other)| relative_error(one, other)).fold(drafts, f32::max)
}

#[test]
fn drafts_match_the_recorded_draft_head_of_transformers() {
    for (folder, name) in CASES {
        let bench = Bench::of(open_with_head(folder), 2);
        let case = Case::read(folder, &bench.checkpoint, name);
        let rows = encode(&bench, &case);
        let whole = run(&bench, &case, &rows, &[usize::MAX]);
        assert_eq!(assert_recorded(&case, &whole, "whole"), 1 + ANSWER);
        let one_by_one = run(&bench, &case, &rows, &[1]);
        let recorded = case.integers("draft_positions").expect("recorded drafts").len();
        assert_eq!(assert_recorded(&case, &one_by_one, "one by one"), recorded);
        for sizes in [&[1][..], &[7], &[16], &[17, 1, 29, 5]] {
            let what = format!("in chunks of {sizes:?}");
            let chunked = run(&bench, &case, &rows, sizes);
            assert_recorded(&case, &chunked, &what);
            let worst = difference(&chunked, &one_by_one).max(difference(&chunked, &whole));
            assert!(worst <= NOISE_TOLERANCE, "{name} {what}: {worst:e}");
        }
        bench.forget(rows);
    }
}

#[test]
fn the_draft_head_reads_pictures_across_chunk_boundaries() {
    let bench = Bench::of(open_with_head(QWEN3_5), 2);
    let case = Case::read(QWEN3_5, &bench.checkpoint, "two_turns");
    let rows = encode(&bench, &case);
    let layout = bench.model.config().lay_out(case.prompt_ids(&bench.checkpoint), &case.visuals).expect("a layout");
    let whole = run(&bench, &case, &rows, &[usize::MAX]);
    for span in &layout.pictures {
        let (start, end) = (span.tokens.start, span.tokens.end);
        for sizes in [[start, usize::MAX], [start + 1, usize::MAX], [end - 1, usize::MAX], [end, usize::MAX]] {
            let worst = difference(&run(&bench, &case, &rows, &sizes), &whole);
            assert!(worst <= NOISE_TOLERANCE, "chunks of {sizes:?}: {worst:e}");
        }
    }
}

#[test]
fn drafts_do_not_depend_on_the_batch() {
    let bench = Bench::of(open_with_head(QWEN3_5), 2);
    let cases = ["single_image", "tokens_65"].map(|name| Case::read(QWEN3_5, &bench.checkpoint, name));
    let rows = cases.each_ref().map(|case| encode(&bench, case));
    let mut sequences = [0, 1].map(|index| bench.sequence(&cases[index], &rows[index]));
    let shares = sequences.iter_mut().map(|sequence| {
        let count = sequence.prompt_left();
        sequence.next_chunk(count)
    });
    let together = bench.step_and_draft(&mut shares.collect::<Vec<_>>(), 3);
    for (index, case) in cases.iter().enumerate() {
        let of_case: Vec<_> = together.drafts.iter().map(|draft| draft[index].clone()).collect();
        let recorded = case.floats("drafted_logits").expect("recorded drafts");
        let error = relative_error(&of_case.concat(), &recorded);
        assert!(error <= REFERENCE_TOLERANCE, "{}: {error:e}", case.name);
    }
}

#[test]
fn a_verifying_step_proposes_one_draft_per_row() {
    for (folder, name) in [CASES[1], CASES[4], CASES[6], CASES[7], CASES[10], CASES[11]] {
        let bench = Bench::of(open_with_head(folder), 2);
        let case = Case::read(folder, &bench.checkpoint, name);
        let mut sequence = bench.sequence(&case, &encode(&bench, &case));
        let prompt = sequence.prompt_left();
        bench.step_and_draft(&mut [sequence.next_chunk(prompt)], 3);
        let drafted = case.greedy_tokens()[..4].to_vec();
        drafted.iter().for_each(|token| sequence.push(*token));
        let found = bench.step_and_draft(&mut [sequence.next_chunk(4).verified()], 1).drafts.remove(0);
        let recorded = case.logits("draft_positions", "draft_logits");
        let expected: Vec<_> =
            recorded.into_iter().filter(|(position, _)| (prompt..prompt + 4).contains(position)).collect();
        assert_eq!((found.len(), expected.len()), (4, 4));
        for (found, (position, expected)) in found.iter().zip(&expected) {
            let error = relative_error(found, expected);
            assert!(error <= REFERENCE_TOLERANCE, "{name}: drafts after token {position} differ by {error:e}");
        }
    }
}

#[test]
fn drafts_on_two_ranks_match_the_recording_and_each_other() {
    for (folder, name) in [CASES[0], CASES[3], CASES[5], CASES[8], CASES[9]] {
        let runs = on_ranks(2, |cpu| {
            let memory = Memory::new(BenchMemory::GOLDEN.capacity);
            let bench = Bench::on(open_with_head(folder), cpu, memory, BenchMemory::GOLDEN);
            let case = Case::read(folder, &bench.checkpoint, name);
            let found = run(&bench, &case, &encode(&bench, &case), &[9]);
            assert_recorded(&case, &found, "on two ranks");
            found.drafts.concat()
        });
        let bits = |run: &[f32]| run.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&runs[0]), bits(&runs[1]), "the ranks have different bits");
    }
}

/// The error of planning a checkpoint with its draft head.
fn refused(checkpoint: Checkpoint) -> LoadError {
    let error = Model::plan(&checkpoint.with_draft_head(true), &CPU).map(drop).expect_err("the head is refused");
    assert!(!error.hint().is_empty());
    error
}

#[test]
fn a_rounded_projection_changes_only_the_logits_of_drafts() {
    for (folder, name) in [CASES[1], CASES[4]] {
        let open = |projection| Bench::of(open_with_head(folder).with_draft_projection(projection), 2);
        let benches = [DraftProjection::Decoder, DraftProjection::Int4].map(open);
        let [plain, rounded] = benches.each_ref().map(|bench| {
            let case = Case::read(folder, &bench.checkpoint, name);
            let mut sequence = bench.sequence(&case, &encode(bench, &case));
            let prompt = sequence.prompt_left();
            bench.step_and_draft(&mut [sequence.next_chunk(prompt)], 1)
        });
        assert_eq!(plain.step, rounded.step, "{folder}: the logits of the decoder");
        let error = relative_error(&rounded.drafts[0][0], &plain.drafts[0][0]);
        // The integers differ from the weights by up to 1/14 of the largest weight of their group.
        assert!((1e-3..0.2).contains(&error), "{folder}: {error:e}");
        let [plain, rounded] = benches.each_ref().map(|bench| &bench.model);
        let decoder = plain.config().decoder();
        let numbers = decoder.vocabulary * decoder.hidden;
        let group =
            [128, 64, 32].into_iter().find(|group| decoder.hidden.is_multiple_of(*group)).expect("whole groups");
        let copy = DType::U4.bytes(numbers) + DType::F32.bytes(numbers / group);
        let added = rounded.weight_bytes() - plain.weight_bytes();
        assert!((copy.0..copy.0 + 4096).contains(&added.0), "{folder}: {added} for {copy}");
        assert_eq!(rounded.parameters(), plain.parameters(), "{folder}: a second copy has no parameters");
    }
}

#[test]
fn a_draft_projection_that_cannot_be_rounded_is_refused_if_asked_for() {
    let turing = Target::Cuda(CudaTarget { capability: (7, 5), sms: 40, activation: DType::F16 });
    let wanted = |projection| Model::plan(&open_with_head(QWEN3_5).with_draft_projection(projection), &turing);
    wanted(DraftProjection::Int4IfSupported).expect("the head uses the decoder's output projection");
    let error = wanted(DraftProjection::Int4).map(drop).expect_err("there are no kernels");
    let message = "the draft head cannot have an output projection in 4-bit integers on cuda sm_75: the target has no \
                   kernels for this format";
    assert_eq!(error.to_string(), message);
    assert!(error.hint().contains("draft_quantization"), "{}", error.hint());
    // 371 rows are not whole blocks of eight.
    let odd = Copy::of(QWEN3_5).set("config.json", &["text_config", "vocab_size"], json!(371));
    let random = without_weights(CheckpointSource::Folder(odd.0.clone())).expect("the settings are valid");
    let random = Checkpoint::open(CheckpointSource::Random(Arc::new(random))).expect("the checkpoint opens");
    let random = random.with_draft_head(true).with_draft_projection(DraftProjection::Int4);
    let error = Model::plan(&random, &CPU).map(drop).expect_err("the rows are odd");
    assert!(error.to_string().contains("its rows are not whole blocks of 8"), "{error}");
}

#[test]
fn a_missing_draft_head_is_refused_with_a_hint() {
    let without_settings = refused(open("tests/golden/qwen3"));
    assert!(matches!(without_settings, LoadError::Config(ConfigError::NoDraftHead)), "{without_settings:?}");
    // transformers saved this checkpoint, with the settings of the head and without its tensors.
    let without_tensors = refused(open("tests/golden/qwen3_5_text"));
    assert!(
        matches!(without_tensors, LoadError::Weights(WeightError::NoDraftHead { module: "mtp" })),
        "{without_tensors:?}"
    );
    for error in [without_settings, without_tensors] {
        assert!(error.hint().contains("set draft_method to ngram or none"), "{}", error.hint());
    }
}

#[test]
fn an_unsupported_draft_head_is_refused_by_name() {
    for (key, value, expected) in [
        ("mtp_num_hidden_layers", json!(2), "config.json: mtp_num_hidden_layers is 2; supported: 1"),
        (
            "mtp_use_dedicated_embeddings",
            json!(true),
            "config.json: mtp_use_dedicated_embeddings is true; supported: false",
        ),
    ] {
        let copy = Copy::of(QWEN3_5).set("config.json", &["text_config", key], value);
        assert_eq!(refused(copy.open()).to_string(), expected);
        Model::plan(&copy.open(), &CPU).expect("the model is planned without its head");
    }
    let none = Copy::of(QWEN3_5).set("config.json", &["text_config", "mtp_num_hidden_layers"], Value::Null);
    assert!(matches!(refused(none.open()), LoadError::Config(ConfigError::NoDraftHead)));
}

#[test]
fn broken_draft_head_tensors_are_refused_by_name() {
    let swapped = Copy::of(QWEN3_5_MOE).edit_header("model.safetensors", "mtp.fc.weight", "mtp.fc.weight", |entry| {
        entry["shape"] = json!([128, 64]);
    });
    let message = "tensor mtp.fc.weight has shape [128, 64], but config.json asks for [64, 128]";
    assert_eq!(refused(swapped.open()).to_string(), message);
    Model::plan(&swapped.open(), &CPU).expect("tensors of a head that is not loaded stay unread");
    for name in ["mtp.norm.weight", "mtp.layers.0.self_attn.q_norm.weight"] {
        let renamed = Copy::of(QWEN3_5_MOE).edit_header("model.safetensors", name, "mtp.unknown", |_| {});
        let error = refused(renamed.open()).to_string();
        assert!(error.contains(name), "{error}");
    }
    let more = Copy::of(QWEN3_5_MOE).add("model.safetensors", "mtp.unknown");
    assert!(matches!(refused(more.open()), LoadError::Weights(WeightError::Extra { count: 1, .. })));
}

/// The error of planning an EAGLE-3 head whose `config.json` is changed at the keys `path`.
fn refused_setting(folder: &str, path: &[&str], value: Value) -> String {
    let head = Copy::of(folder).set("config.json", path, value);
    refused_head(&head, if folder == EAGLE3 { "tests/golden/llama" } else { "tests/golden/qwen3_vl" }).to_string()
}

fn refused_head(head: &Copy, target: &str) -> LoadError {
    refused(open(target).with_draft_model(&CheckpointSource::Folder(head.0.clone())).expect("the head opens"))
}

#[test]
fn an_eagle3_head_that_does_not_fit_the_model_is_refused_by_name() {
    for (folder, path, value, expected) in [
        (EAGLE3, &["hidden_size"][..], json!(64), "hidden_size is 64, but the model has 48"),
        (EAGLE3_VL, &["target_hidden_size"], json!(96), "target_hidden_size is 96, but the model has 64"),
        (EAGLE3, &["num_key_value_heads"], json!(1), "num_key_value_heads is 1, but the model has 2"),
        (EAGLE3, &["head_dim"], json!(32), "head_dim is 32, but the model has 64"),
        (EAGLE3, &["vocab_size"], json!(400), "vocab_size is 400, but the model has 384"),
        (EAGLE3, &["draft_vocab_size"], json!(385), "draft_vocab_size is 385; expected from 1 to 384"),
        (EAGLE3, &["num_hidden_layers"], json!(2), "num_hidden_layers is 2; expected from 1 to 1"),
        (
            EAGLE3,
            &["eagle_aux_hidden_state_layer_ids"],
            json!([1, 2]),
            "eagle_aux_hidden_state_layer_ids is [1, 2]; expected ascending layer indices below 2, the number of layers of \
             the model",
        ),
        (
            EAGLE3,
            &["eagle_config", "use_aux_hidden_state"],
            json!(false),
            "eagle_config.use_aux_hidden_state is false; this changes what the model computes and is not supported",
        ),
        (
            EAGLE3,
            &["norm_before_fc"],
            json!(true),
            "norm_before_fc is true; this changes what the model computes and is not supported",
        ),
    ] {
        assert_eq!(refused_setting(folder, path, value), format!("draft model: config.json: {expected}"));
    }
    let default = refused_setting(EAGLE3, &["eagle_aux_hidden_state_layer_ids"], Value::Null);
    assert!(default.contains("eagle_aux_hidden_state_layer_ids is [2, 1, 0]"), "{default}");
}

#[test]
fn broken_eagle3_tensors_are_refused_by_name() {
    let rename = |name: &str| Copy::of(EAGLE3).edit_header("model.safetensors", name, "unknown", |_| {});
    for name in ["fc.weight", "midlayer.self_attn.q_proj.weight", "lm_head.weight", "d2t"] {
        let error = refused_head(&rename(name), "tests/golden/llama").to_string();
        assert!(error.contains(&format!("draft_model.{name}")), "{error}");
    }
    let swapped = Copy::of(EAGLE3).edit_header("model.safetensors", "fc.weight", "fc.weight", |entry| {
        entry["shape"] = json!([96, 48]);
    });
    let error = refused_head(&swapped, "tests/golden/llama").to_string();
    assert_eq!(error, "tensor draft_model.fc.weight has shape [96, 48], but config.json asks for [48, 96]");
    let outside = Copy::of(EAGLE3).edit_header("model.safetensors", "d2t", "t2d.d2t", |_| {});
    let outside = outside
        .double("model.safetensors", "t2d.d2t", "d2t", |bytes| bytes[..8].copy_from_slice(&384i64.to_le_bytes()));
    let error = refused_head(&outside, "tests/golden/llama").to_string();
    assert_eq!(error, "draft_model.d2t adds 384 to the index 0; expected a token id from 0 to 383");
    // Without weights, the head's settings are enough.
    let fewer = Copy::of(EAGLE3).set("config.json", &["vocab_size"], json!(200));
    let target = Copy::of("tests/golden/llama").set("config.json", &["vocab_size"], json!(200));
    let random = without_weights(CheckpointSource::Folder(target.0.clone())).expect("the settings are valid");
    let random =
        open_random(random).with_draft_model(&CheckpointSource::Folder(fewer.0.clone())).expect("the head opens");
    Model::plan(&random.with_draft_head(true), &CPU).expect("a random checkpoint draws the head's tensors");
}

#[test]
fn a_head_without_weights_is_planned_like_a_head_with_weights() {
    let heads = [
        (EAGLE3, "tests/golden/llama"),
        (EAGLE3_VL, "tests/golden/qwen3_vl"),
        (ASSISTANT, ASSISTANT_TARGET),
        (ASSISTANT_VL, "tests/golden/gemma4"),
    ];
    for (head, target) in heads {
        let source = CheckpointSource::Folder(repository(head));
        let random = open(target).with_random_draft_model(&source).expect("the settings are valid");
        let [random, stored] = [random.with_draft_head(true), open_with_head(head)].map(|checkpoint| {
            let model = Model::plan(&checkpoint, &CPU).expect("the model is planned");
            (model.weight_bytes(), model.draft_bytes())
        });
        assert_eq!(random, stored, "{head}");
    }
}

#[test]
fn an_eagle3_head_in_torchs_format_gives_the_same_drafts() {
    let drafts = |checkpoint| {
        let bench = Bench::of(checkpoint, 2);
        let case = Case::read(EAGLE3, &bench.checkpoint, "short");
        run(&bench, &case, &[], &[usize::MAX])
    };
    let torch = CheckpointSource::Folder(repository("tests/golden/pytorch/eagle3"));
    let torch = open("tests/golden/llama").with_draft_model(&torch).expect("the head opens").with_draft_head(true);
    let (found, expected) = (drafts(torch), drafts(open_with_head(EAGLE3)));
    assert_eq!((found.tokens, found.drafts), (expected.tokens, expected.drafts));
}

#[test]
fn an_eagle3_head_stays_unread_without_drafts() {
    let target = |head: &str| open_with_head(head).with_draft_head(false);
    for (head, folder) in [(EAGLE3, "tests/golden/llama"), (EAGLE3_VL, "tests/golden/qwen3_vl")] {
        let (alone, with) = (Model::plan(&open(folder), &CPU), Model::plan(&target(head), &CPU));
        let (alone, with) = (alone.expect("the model is planned"), with.expect("the model is planned"));
        assert_eq!(alone.weight_bytes(), with.weight_bytes(), "{head}");
        assert_eq!(alone.kv_shape(&CPU), with.kv_shape(&CPU), "{head}");
        let drafting = Model::plan(&open_with_head(head), &CPU).expect("the model is planned");
        assert_eq!(drafting.kv_shape(&CPU).layers, alone.kv_shape(&CPU).layers + 1, "{head}");
        assert!(drafting.weight_bytes() > alone.weight_bytes(), "{head}");
        assert_ne!(open(folder).fingerprint(), target(head).fingerprint(), "{head}");
    }
}

#[test]
fn an_assistant_for_another_model_is_refused_by_name() {
    let hint = "supported: 0 or num_hidden_layers";
    for (path, value, expected) in [
        (&["backbone_hidden_size"][..], json!(64), "backbone_hidden_size is 64, but the model has 48"),
        (&["backbone_hidden_size"], Value::Null, "missing field `backbone_hidden_size`"),
        (&["text_config", "vocab_size"], json!(408), "text_config.vocab_size is 408, but the model has 384"),
        (
            &["text_config", "num_key_value_heads"],
            json!(1),
            "text_config.num_key_value_heads is 1, but the model has 2",
        ),
        (&["text_config", "head_dim"], json!(64), "text_config.head_dim is 64, but the model has 32"),
        (&["text_config", "global_head_dim"], json!(32), "text_config.global_head_dim is 32, but the model has 64"),
        (&["text_config", "sliding_window"], json!(24), "has a layer with a window of 24 tokens, but the model has no"),
        (&["text_config", "num_kv_shared_layers"], json!(2), &format!("num_kv_shared_layers is 2; {hint}")),
        (
            &["text_config", "rope_parameters", "full_attention", "rope_theta"],
            json!(5000.0),
            "text_config.rope_parameters.full_attention differs from the model's",
        ),
        (&["text_config", "use_double_wide_mlp"], json!(true), "use_double_wide_mlp is true; supported: false"),
        (&["num_centroids"], json!(4097), "num_centroids is 4097; expected from 1 to 4096"),
        (&["num_centroids"], json!(25), "num_centroids is 25, which does not divide text_config.vocab_size, 384"),
        (&["centroid_intermediate_top_k"], json!(25), "centroid_intermediate_top_k is 25; expected from 1 to 24"),
    ] {
        let head = Copy::of(ASSISTANT).set("config.json", path, value);
        let error = refused_head(&head, ASSISTANT_TARGET).to_string();
        assert!(error.starts_with("draft model: config.json: ") && error.contains(expected), "{error}");
    }
    let embeddings = Copy::of(ASSISTANT).set("config.json", &["text_config", "vocab_size_per_layer_input"], json!(384));
    let embeddings = embeddings.set("config.json", &["text_config", "hidden_size_per_layer_input"], json!(8));
    let error = refused_head(&embeddings, ASSISTANT_TARGET).to_string();
    assert!(error.contains("text_config.hidden_size_per_layer_input is 8; supported: 0"), "{error}");
    let other = refused_head(&Copy::of(ASSISTANT), "tests/golden/qwen2").to_string();
    assert!(other.contains("but the model has no such layer of Gemma 4"), "{other}");
    let unshared = Copy::of(ASSISTANT).set("config.json", &["text_config", "num_kv_shared_layers"], json!(0));
    let unified = unshared.set("config.json", &["model_type"], json!("gemma4_unified_assistant"));
    let draft = CheckpointSource::Folder(unified.0.clone());
    let checkpoint = open(ASSISTANT_TARGET).with_draft_model(&draft).expect("the assistant opens");
    Model::plan(&checkpoint.with_draft_head(true), &CPU).expect("an assistant with the model_type of 12B is planned");
}

#[test]
fn broken_assistant_tensors_are_refused_by_name() {
    for name in ["pre_projection.weight", "model.layers.2.self_attn.q_proj.weight", "masked_embedding.token_ordering"] {
        let renamed = Copy::of(ASSISTANT).edit_header("model.safetensors", name, "unknown", |_| {});
        let error = refused_head(&renamed, ASSISTANT_TARGET).to_string();
        assert!(error.contains(&format!("draft_model.{name}")), "{error}");
    }
    let ordering = "masked_embedding.token_ordering";
    for (ids, expected) in [(&[384_i64][..], "384 at index 0"), (&[-1], "-1 at index 0"), (&[7, 7], "7 at index 1")] {
        let renamed = Copy::of(ASSISTANT).edit_header("model.safetensors", ordering, "old", |_| {});
        let first: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let head =
            renamed.double("model.safetensors", "old", ordering, |bytes| bytes[..first.len()].copy_from_slice(&first));
        let error = refused_head(&head, ASSISTANT_TARGET).to_string();
        let hint = "expected each token id from 0 to 383 exactly once";
        assert_eq!(error, format!("draft_model.{ordering} has {expected}; {hint}"));
    }
}

#[test]
fn an_assistant_adds_weights_and_no_cache() {
    let plan = |checkpoint: Checkpoint| Model::plan(&checkpoint, &CPU).expect("the model is planned");
    let (alone, with) = (plan(open(ASSISTANT_TARGET)), plan(open_with_head(ASSISTANT)));
    assert_eq!((alone.kv_shape(&CPU), alone.cache_groups()), (with.kv_shape(&CPU), with.cache_groups()));
    assert!(with.draft_bytes() > Bytes::ZERO);
    assert_eq!(alone.weight_bytes() + with.draft_bytes(), with.weight_bytes());
}

#[test]
fn an_assistant_reads_an_fp8_cache_with_the_decoders_scales() {
    // Layers 3 and 4 are the layers whose keys and values the assistant reads.
    let mut scaled = Copy::of(ASSISTANT_TARGET);
    for (layer, part) in [(3, "k"), (3, "v"), (4, "k"), (4, "v")] {
        let name = format!("model.layers.{layer}.self_attn.{part}_scale");
        let quarter = half::bf16::from_f32(0.25).to_le_bytes();
        let scalar = format!("model.layers.{layer}.layer_scalar");
        scaled = scaled.double("model.safetensors", &scalar, &name, |bytes| bytes.copy_from_slice(&quarter));
    }
    let first_draft = |target: Checkpoint, cache| {
        let head = CheckpointSource::Folder(repository(ASSISTANT));
        let checkpoint = target.with_draft_model(&head).expect("the head opens").with_draft_head(true);
        let bench = Bench::of(checkpoint.with_cache(cache), 2);
        let case = Case::read(ASSISTANT, &bench.checkpoint, "long");
        let mut sequence = bench.sequence(&case, &[]);
        let prompt = sequence.prompt_left();
        // The next token is known, so that the draft does not depend on the sampled token.
        bench.step_and_draft(&mut [sequence.next_chunk(prompt - 1)], 1).drafts.concat().concat()
    };
    let plain = first_draft(open(ASSISTANT_TARGET), CacheFormat::Plain);
    for target in [open(ASSISTANT_TARGET), scaled.open()] {
        let error = relative_error(&first_draft(target, CacheFormat::Fp8), &plain);
        assert!((1e-4..0.3).contains(&error), "{error:e}");
    }
}

#[test]
fn the_plan_counts_the_draft_heads_cache_layer_and_weights() {
    let gpu = Target::Cuda(CudaTarget { capability: (9, 0), sms: 132, activation: DType::BF16 });
    for rank in Rank::all(2) {
        let plan = |checkpoint| Model::plan_rank(&checkpoint, &gpu, rank).expect("the model is planned");
        let (plain, drafting) = (plan(open(QWEN3_5_MOE)), plan(open_with_head(QWEN3_5_MOE)));
        assert_eq!((plain.kv_shape(&gpu).layers, drafting.kv_shape(&gpu).layers), (2, 3));
        assert_eq!(plain.state_shape(&gpu), drafting.state_shape(&gpu));
        assert!(drafting.weight_bytes() > plain.weight_bytes());
        let experts = |model: &Model| model.expert_loads().expect("the model has experts").rows();
        assert_eq!((experts(&plain), experts(&drafting)), (4, 5));
    }
    // The draft head of 27B: queries with gates and outputs of 24 heads, 4 KV heads, an MLP, and
    // the input projection.
    let (hidden, queries, keys, mlp) = (5120u64, 24 * 256, 4 * 256, 17_408);
    let matrices = hidden * (3 * queries + 2 * keys + 3 * mlp + 2 * hidden);
    let parameters = |is_loaded| {
        let random = open_random(random_checkpoint("qwen3.5-27b", 0).expect("a known shape"));
        Model::plan(&random.with_draft_head(is_loaded), &gpu).expect("the model is planned").parameters()
    };
    assert_eq!(parameters(true) - parameters(false), matrices + 5 * hidden + 2 * 256);
}

#[test]
fn every_shape_of_the_family_has_a_draft_head() {
    for name in shapes().filter(|name| name.starts_with("qwen3.5")) {
        let settings = open_random(shape_settings(name).expect("a known shape")).with_draft_head(true);
        let model = Model::plan(&settings, &CPU).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(model.config().decoder().draft_cache_layers(), 1, "{name}");
    }
    let random = |name| open_random(random_checkpoint(name, 3).expect("a known shape")).with_draft_head(true);
    for name in ["qwen3.5-tiny", "qwen3.5-moe-tiny"] {
        let bench = Bench::of(random(name), 1);
        let layout = bench.model.config().lay_out((0..40).collect(), &[]).expect("the prompt is laid out");
        let mut sequence = bench.start(layout, &[]);
        let drafted = bench.step_and_draft(&mut [sequence.next_chunk(40)], 2);
        assert_ne!(drafted.drafts[0], drafted.drafts[1], "{name}");
    }
}

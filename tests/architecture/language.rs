//! Language of the sources: names that were replaced, sentences that read as translated, and docs
//! that only repeat a name.

use std::collections::BTreeSet;

use super::{assert_none, code, sources};

const FOLDERS: [&str; 9] =
    ["budgets/src", "kernels/src", "model/src", "actors/src", "src", "serve/src", "cli/src", "examples", "benches"];

/// Folders whose names are checked in addition to `FOLDERS`.
const TESTS: [&str; 6] = ["budgets/tests", "kernels/tests", "model/tests", "actors/tests", "tests", "integrations"];

/// Metaphors, and words that had several meanings, with the name that is used now.
const REPLACED: [(&str, &str); 90] = [
    ("Basis", "ProfileKey"),
    ("Brought", "Contribution"),
    ("Card", "FilledDevice"),
    ("CardLine", "GpuLine"),
    ("ComeAgain", "Readmit"),
    ("Coming", "Downloading"),
    ("Course", "AttemptProgress"),
    ("DraftMessage", "RequestMessage"),
    ("EngineParts", "EngineBuffers"),
    ("FAULT_NOT_NUMBERS", "FAULT_NON_FINITE_LOGITS"),
    ("FEW_WARPS", "SMALL_M_WARPS"),
    ("Fewest", "MinDevices"),
    ("FilmReader", "VideoDecoder"),
    ("FilmShare", "VideoLimits"),
    ("FoundPart", "TensorSource"),
    ("House", "Deployment"),
    ("Hungry", "WaitingForMemory"),
    ("ImageBytes", "EncodedImage"),
    ("Kept", "RetainedState"),
    ("LanesPlace", "LaneResources"),
    ("LetIn", "AdmitWaiting"),
    ("Likeliest", "Greedy"),
    ("Lowered", "EffectiveLimits"),
    ("LyingDown", "Releasing"),
    ("MadeScales", "ComputedScales"),
    ("MetGemms", "RecordedGemms"),
    ("Nap", "SleepState"),
    ("Needs", "MemoryRequirements"),
    ("Numbers", "Inputs, Xorshift or NumberedParts"),
    ("Order", "ElementOrder"),
    ("Pace", "TokenInterval"),
    ("Part", "ContentPart, StateSequence or ShardAxis"),
    ("Parting", "PendingRelease"),
    ("Patience", "Disconnect"),
    ("Patient", "WriteTimeout"),
    ("PictureContent", "ContentSpan"),
    ("PictureCost", "EncoderCost"),
    ("PictureModel", "VisionLanguageModel"),
    ("PicturePlace", "Placeholder"),
    ("PictureRow", "EmbeddingLayout"),
    ("PictureRows", "EmbeddingRows"),
    ("Place", "TensorLocation, CallState or TestDevice"),
    ("Places", "TensorTable"),
    ("Post", "GateState"),
    ("ProductsBy", "GemmBackend"),
    ("Revoker", "RevokeHandle"),
    ("Rigour", "StressLevel"),
    ("Room", "Scratch, Headroom or a permit"),
    ("Rounded", "QuantizedRows"),
    ("RoundedOutput", "QuantizedOutput"),
    ("RoundedRows", "QuantizedInput"),
    ("RunningPart", "RunningSequence"),
    ("Seats", "Reservations"),
    ("Share", "Fraction, SequenceRows or SequenceChunk"),
    ("Sought", "PlacementQuery or RecordQuery"),
    ("Stretch", "BlockRange, Mapping or Temporary"),
    ("Telling", "ReplyContext or an encoder"),
    ("Visual", "Media"),
    ("VisualGrid", "MediaGrid"),
    ("VisualPlan", "MediaPlan"),
    ("Waken", "Wake"),
    ("Wish", "RequestKind"),
    ("bring_home", "release_memory"),
    ("canary_told", "canary_reported"),
    ("check_wish", "check_waiting"),
    ("fewest", "min_ranks"),
    ("film", "video"),
    ("film_time", "video_time"),
    ("films", "videos"),
    ("heard", "received"),
    ("hunger", "queue_for_memory"),
    ("is_film", "is_video"),
    ("is_tidied_up", "is_trim_scheduled"),
    ("lie_down", "release_engine"),
    ("multiply_few", "multiply_small_m"),
    ("multiply_many", "multiply_large_m"),
    ("naps", "sleep_tasks"),
    ("out_is_rounded", "out_is_quantized"),
    ("parting_fence", "pending_fence"),
    ("refuse_unserved", "refuse_unsupported"),
    ("rounded_flops", "quantized_flops"),
    ("starve", "refuse_first_waiting"),
    ("strike", "inject"),
    ("told_ids", "prompt_ids"),
    ("told_models", "count_of_models"),
    ("told_text", "snapshot_text"),
    ("turned_scales", "transposed_scales"),
    ("unserved_experts", "unsupported_experts"),
    ("unserved_weight", "unsupported_weight"),
    ("with_pace", "with_token_interval"),
];

/// Openings of sentences that a reader has to decode.
const OPENINGS: [&str; 7] = ["As above", "As below", "Of the ", "To the ", "What ", "Whoever ", "Whose "];
/// Phrases that a reader has to decode.
const PHRASES: [&str; 8] =
    ["as above", "is none of", "are none", "so many that there", "stands for none", "who come", "whoever", "of whom"];

/// Exceptions: a file, and words that mark the lines in it that may contain one of `OPENINGS` or
/// `PHRASES`.
const ALLOWED: [(&str, &str); 0] = [];

#[test]
fn replaced_names_are_not_used() {
    let mut found = Vec::new();
    for (name, text) in FOLDERS.iter().chain(&TESTS).flat_map(|folder| sources(folder)) {
        // This file lists the names.
        if name == "tests/architecture/language.rs" {
            continue;
        }
        let code = code(&text);
        let words: BTreeSet<&str> = code.split(|char: char| !char.is_alphanumeric() && char != '_').collect();
        let old = REPLACED.iter().filter(|(old, _)| words.contains(old));
        found.extend(old.map(|(old, new)| format!("{name}: {old} (now: {new})")));
    }
    assert_none(found, "names say what things are");
}

/// The comment lines of a file: number, kind and text.
fn comments(text: &str) -> impl Iterator<Item = (usize, &str, &str)> {
    text.lines().enumerate().filter_map(|(at, line)| {
        let line = line.trim_start();
        let kind = ["///", "//!", "//"].into_iter().find(|kind| line.starts_with(kind))?;
        Some((at + 1, kind, line[kind.len()..].trim()))
    })
}

#[test]
fn comments_name_their_subject() {
    let mut found = Vec::new();
    for (name, text) in FOLDERS.iter().flat_map(|folder| sources(folder)) {
        // A line may continue a sentence of the line before.
        let mut before = (0, "", ".");
        for comment @ (line, kind, words) in comments(&text) {
            let continues =
                before.0 + 1 == line && before.1 == kind && !before.2.is_empty() && !before.2.ends_with('.');
            let opens = !continues && OPENINGS.iter().any(|opening| words.starts_with(opening));
            let has_phrase = PHRASES.iter().any(|phrase| words.contains(phrase));
            let is_allowed = ALLOWED.iter().any(|(file, allowed)| name == *file && words.contains(allowed));
            if (opens || has_phrase) && !is_allowed {
                found.push(format!("{name}:{line}: {words}"));
            }
            before = comment;
        }
    }
    assert_none(found, "write subject, verb and object, as CONTRIBUTING.md says");
}

#[test]
fn docs_say_more_than_a_name() {
    const WORDS_MIN: usize = 4;
    let mut found = Vec::new();
    for folder in &FOLDERS {
        for (name, text) in sources(folder) {
            let lines: Vec<&str> = text.lines().map(str::trim).collect();
            let is_doc = |at: usize| lines.get(at).is_some_and(|line| line.starts_with("///"));
            for at in (0..lines.len()).filter(|&at| is_doc(at)) {
                let (is_whole, comment) = (!at.checked_sub(1).is_some_and(is_doc) && !is_doc(at + 1), &lines[at][3..]);
                // A doc with a unit, a shape, a number or a link says more than a name.
                let is_useful = comment.contains(['`', '[', '%', '<'])
                    || comment.contains(char::is_numeric)
                    || comment.contains(" per ");
                // Short docs are allowed if they are program output or document the public facade.
                let is_shown = lines.get(at + 1).is_some_and(|next| next.starts_with("#[") || next.starts_with("pub "))
                    || text.contains("ValueEnum");
                if is_whole && !is_useful && !is_shown && comment.split_whitespace().count() < WORDS_MIN {
                    found.push(format!("{name}:{}: {comment}", at + 1));
                }
            }
        }
    }
    assert_none(found, "a doc gives a reason, a unit, a range or a source; otherwise leave it out");
}

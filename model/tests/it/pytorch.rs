//! Weights written by `torch.save`: two golden checkpoints in this format, and files that are
//! damaged in every way.

use bursar_model::{checkpoint::Checkpoint, error::CheckpointError};

use crate::{
    bench::{Bench, Random, open},
    common::golden_bytes,
    copy::Copy,
};

const SINGLE: &str = "pytorch_model.bin";
const INDEX: &str = "pytorch_model.bin.index.json";
const SHARDS: [&str; 2] = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"];

fn recorded(name: &str) -> Vec<u8> {
    golden_bytes(&format!("pytorch/{name}"))
}

/// The golden checkpoint `name` with `files` instead of its weights.
fn with(name: &str, files: &[(&str, Vec<u8>)]) -> Copy {
    let copy = Copy::of(&format!("tests/golden/{name}"));
    std::fs::remove_file(copy.0.join("model.safetensors")).expect("the file existed");
    files.iter().for_each(|(file, bytes)| std::fs::write(copy.0.join(file), bytes).expect("the file can be written"));
    copy
}

fn assert_same_weights(found: &Checkpoint, expected: &Checkpoint) {
    for name in expected.tensors.names() {
        let [ours, theirs] = [found, expected].map(|checkpoint| checkpoint.tensor(name).expect("the tensor exists"));
        assert_eq!((ours.dtype, ours.shape, ours.bytes), (theirs.dtype, theirs.shape, theirs.bytes), "{name}");
    }
}

#[test]
fn a_tied_pytorch_file_has_the_weights_of_its_safetensors() {
    let copy = with("llama", &[(SINGLE, recorded(SINGLE))]);
    let (checkpoint, golden) = (copy.open(), open("tests/golden/llama"));
    assert_same_weights(&checkpoint, &golden);
    assert!(checkpoint.tensors.contains("lm_head.weight") && !golden.tensors.contains("lm_head.weight"));
    assert_ne!(checkpoint.weights_fingerprint(), golden.weights_fingerprint());
    Bench::of(checkpoint, 1);
}

#[test]
fn pytorch_shards_have_the_weights_of_one_safetensors_file() {
    let mut files: Vec<_> = SHARDS.iter().map(|shard| (*shard, recorded(shard))).collect();
    files.push((INDEX, golden_bytes(&format!("pytorch/{INDEX}"))));
    let whole = with("qwen2", &files);
    let checkpoint = whole.open();
    assert_eq!(checkpoint.tensors.shards().len(), 2);
    assert_same_weights(&checkpoint, &open("tests/golden/qwen2"));
    let error = refused(&with("qwen2", &files[1..]));
    assert!(matches!(&error, CheckpointError::MissingShard { shard, shards: 2, .. } if shard == SHARDS[0]), "{error}");
    files[0].1 = files[1].1.clone();
    let error = refused(&with("qwen2", &files));
    assert!(matches!(&error, CheckpointError::Inconsistent { .. }), "{error}");
}

#[test]
fn safetensors_take_precedence_over_a_pytorch_file() {
    let copy = Copy::of("tests/golden/llama");
    std::fs::write(copy.0.join(SINGLE), "not read").expect("the file can be written");
    assert_eq!(copy.open().tensors.shards()[0].file(), "model.safetensors");
}

fn refused(copy: &Copy) -> CheckpointError {
    Checkpoint::open(bursar_model::checkpoint::CheckpointSource::Folder(copy.0.clone()))
        .expect_err("the checkpoint is refused")
}

/// The error for the recorded file after a change.
fn error_after(change: impl FnOnce(&mut Vec<u8>)) -> String {
    let mut bytes = recorded(SINGLE);
    change(&mut bytes);
    refused(&with("llama", &[(SINGLE, bytes)])).to_string()
}

/// Overwrites the first occurrence of `from` with `to`, which has the same length.
fn put(bytes: &mut [u8], from: &[u8], to: &[u8]) {
    let at = bytes.windows(from.len()).position(|found| found == from).expect("the file contains the text");
    bytes[at..][..to.len()].copy_from_slice(to);
}

#[test]
fn files_that_torch_did_not_write_are_refused() {
    let cases = [
        (error_after(|bytes| bytes.truncate(bytes.len() / 2)), "has no end record"),
        (
            error_after(Vec::clear),
            "the format is not a zip archive; supported: the zip format that torch.save writes since PyTorch 1.6",
        ),
        (
            error_after(|bytes| *bytes = b"\x80\x02\x8a".to_vec()),
            "supported: the zip format that torch.save writes since PyTorch 1.6",
        ),
        (error_after(|bytes| put(bytes, b"_rebuild_tensor_v2", b"_rebuild_tensor_v9")), "is not a tensor"),
        (error_after(|bytes| put(bytes, b"\x80\x02", b"\x80\x02\xff")), "an instruction that torch does not write"),
        (error_after(|bytes| put(bytes, b"little", b"big   ")), "not little-endian"),
        (error_after(|bytes| put(bytes, b"ctorch\n", b"ctorcx\n")), "refers to a storage that the file lacks"),
        (error_after(|bytes| put(bytes, b"cpu", b"\xff\xff\xff")), "a string that is not UTF-8"),
        (error_after(|bytes| flag(bytes, 10, 8)), "is compressed or encrypted"),
        (error_after(|bytes| flag(bytes, 24, 1)), "is not compressed, but has the sizes"),
    ];
    for (error, expected) in cases {
        assert!(error.contains(expected), "{error} should say: {expected}");
    }
}

/// Changes a byte of the first entry of the central directory.
fn flag(bytes: &mut [u8], at: usize, change: u8) {
    let entry = bytes.windows(4).position(|found| found == b"PK\x01\x02").expect("the archive has a directory");
    bytes[entry + at] ^= change;
}

#[test]
fn an_unsupported_pytorch_type_is_named_on_access() {
    let mut bytes = recorded(SINGLE);
    put(&mut bytes, b"BFloat16Storage", b"QFloat16Storage");
    let checkpoint = with("llama", &[(SINGLE, bytes)]).open();
    let error = checkpoint.tensor("model.norm.weight").expect_err("the data type is unknown");
    assert_eq!(
        error.to_string(),
        "the tensor model.norm.weight has the type QFloat16Storage; supported: BF16, F16, F32 and F8_E4M3"
    );
}

#[test]
fn damaged_pytorch_files_never_panic() {
    let (bytes, mut random, mut opened) = (recorded(SINGLE), Random::new(5), 0);
    let copy = with("llama", &[(SINGLE, bytes.clone())]);
    let path = copy.0.join(SINGLE);
    let position =
        |word: &[u8]| bytes.windows(word.len()).position(|found| found == word).expect("the file contains the word");
    let (pickle, list) = (position(b"\x80\x02")..position(b"\x80\x02") + 6000, position(b"PK\x01\x02")..bytes.len());
    for place in [&pickle, &list] {
        for _ in 0..400 {
            let mut damaged = bytes.clone();
            for _ in 0..1 + random.below(3) {
                let values = [0, 1, 0x7f, 0x80, 0xff, b'R', b't', b'h', random.below(256) as u8];
                damaged[place.start + random.below(place.len())] = values[random.below(values.len())];
            }
            std::fs::write(&path, damaged).expect("the file can be written");
            let source = bursar_model::checkpoint::CheckpointSource::Folder(copy.0.clone());
            let Ok(checkpoint) = Checkpoint::open(source) else { continue };
            opened += 1;
            checkpoint.tensors.names().for_each(|name| drop(checkpoint.tensor(name)));
        }
    }
    assert!((1..800).contains(&opened), "{opened} damaged files opened; expected 1 to 799");
}

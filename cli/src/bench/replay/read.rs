//! Parsers of trace files: JSON lines as published by Mooncake (arXiv 2407.00079),
//! JSON lines of OpenAI requests, and one JSON object with several runs.
//! `docs/commands.md` describes the formats.

use std::{fs, path::Path, time::Duration};

use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    arrivals::{Arrivals, Asked, Caller, Kind, Piece, ReplayPicture, ReplayRequest},
    messages,
};
use crate::failure::Failure;

/// Tokens that one hash id represents in Mooncake's traces.
const HASHED_TOKENS: usize = 512;

/// Tokens of a reply if its request has no limit.
const REPLY: usize = 128;

/// A JSON object with several runs. Its requests have random tokens, or one picture, which comes
/// from a file or is generated.
#[derive(Deserialize)]
struct Runs {
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Run {
    name: String,
    requests: Vec<Drawn>,
}

#[derive(Deserialize)]
struct Drawn {
    /// Seconds from the start.
    t: f64,
    /// Tokens of a prompt without a picture.
    prompt: usize,
    out: usize,
    #[serde(default)]
    file: String,
    seed: u64,
}

#[derive(Deserialize)]
struct Line {
    /// Arrival time in milliseconds, from any starting point. The earliest line is replayed at time
    /// 0. Either all lines have a timestamp or no line has one.
    timestamp: Option<f64>,
    input_length: Option<usize>,
    output_length: Option<usize>,
    #[serde(default)]
    hash_ids: Vec<u64>,
    /// A request of OpenAI's chat completions API, as in a file of its batch API. Alternatively,
    /// the line itself has the fields of the request.
    body: Option<Value>,
    messages: Option<Value>,
    tools: Option<Value>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
}

/// The source of pictures.
pub struct PictureSource<'p> {
    /// The folder of a trace's pictures. If `None`, the pictures of a `Runs` file are generated,
    /// and picture files of JSON lines are looked up in the folder of the trace.
    pub folder: Option<&'p Path>,
    /// Side of a generated picture, in pixels.
    pub side: u32,
}

/// Reads a trace file.
///
/// # Errors
/// The failure names the line and says what is wrong with it.
pub fn trace(path: &Path, pictures: &PictureSource<'_>) -> Result<Vec<Arrivals>, Failure> {
    let wrong = |error: String| Failure {
        error: format!("the trace {} cannot be read: {error}", path.display()),
        hint: "docs/commands.md describes the formats, under bench".to_owned(),
    };
    let text = fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let folder = pictures.folder.or(path.parent()).unwrap_or(Path::new("."));
    let arrivals = match serde_json::from_str::<Runs>(&text) {
        Ok(Runs { runs }) => runs.into_iter().map(|run| drawn(run, pictures)).collect::<Result<_, _>>(),
        Err(error) if is_one_object(&text) => Err(error.to_string()),
        Err(_) => lines(name, &text, folder).map(|arrivals| vec![arrivals]),
    };
    let arrivals: Vec<Arrivals> = arrivals.map_err(wrong)?;
    if arrivals.iter().all(|arrivals| !arrivals.callers.is_empty()) && !arrivals.is_empty() {
        Ok(arrivals)
    } else {
        Err(wrong("it contains no requests".to_owned()))
    }
}

/// Whether a file was meant to be one object with runs, instead of lines.
fn is_one_object(text: &str) -> bool {
    let Some(first) = text.lines().find(|line| !line.trim().is_empty()) else { return false };
    match serde_json::from_str::<Value>(first) {
        Ok(line) => line.get("runs").is_some(),
        Err(error) => error.is_eof(),
    }
}

fn drawn(run: Run, pictures: &PictureSource<'_>) -> Result<Arrivals, String> {
    let caller = |(number, drawn): (usize, Drawn)| {
        let Drawn { t, prompt, out, file, seed } = drawn;
        let kind = if file.is_empty() { Kind::Text } else { Kind::Picture };
        let asked = match (kind, pictures.folder) {
            (Kind::Text, _) => Asked::Tokens(vec![Piece { seed, tokens: prompt }]),
            (Kind::Picture, folder) => {
                let side = pictures.side;
                let drawn = ReplayPicture::Drawn { seed, width: side, height: side };
                let picture = folder.map_or(drawn, |folder| ReplayPicture::File(folder.join(&file)));
                Asked::Said { text: "Describe.".to_owned(), pictures: vec![picture] }
            }
        };
        let wrong = |what: &str| format!("request {number} of run {}: {what}", run.name);
        if kind == Kind::Text && prompt == 0 {
            return Err(wrong("prompt is 0"));
        }
        let at = seconds(t).ok_or_else(|| wrong("t is not a time"))?;
        Ok(alone(at, ReplayRequest { kind, pause: Duration::ZERO, asked, reply: out.max(1) }))
    };
    let callers = run.requests.into_iter().enumerate().map(caller).collect::<Result<_, String>>()?;
    Ok(in_order(run.name.clone(), callers))
}

fn lines(name: String, text: &str, folder: &Path) -> Result<Arrivals, String> {
    let mut has_times = None;
    let mut read = |(number, line): (usize, &str)| {
        let read = serde_json::from_str(line).map_err(|error| error.to_string()).and_then(|line: Line| {
            let is_timed = line.timestamp.is_some();
            if *has_times.get_or_insert(is_timed) == is_timed {
                caller(line, folder)
            } else {
                Err("some lines have a timestamp, other lines have none".to_owned())
            }
        });
        read.map_err(|error| format!("line {}: {error}", number + 1))
    };
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let mut arrivals = in_order(name, lines.map(&mut read).collect::<Result<_, _>>()?);
    // Timestamps in logs start at an arbitrary date, so shift them to start at 0.
    let first = arrivals.callers.first().map(|caller| caller.at).unwrap_or_default();
    arrivals.callers.iter_mut().for_each(|caller| caller.at -= first);
    Ok(arrivals)
}

fn caller(line: Line, folder: &Path) -> Result<Caller, String> {
    let at = seconds(line.timestamp.unwrap_or(0.0) / 1e3).ok_or("timestamp is not a time")?;
    let body = line.body.clone().or_else(|| {
        let Line { messages, tools, max_tokens, max_completion_tokens, .. } = &line;
        messages.as_ref().map(|messages| {
            json!({ "messages": messages, "tools": tools, "max_tokens": max_completion_tokens.or(*max_tokens) })
        })
    });
    let turn = match (body, line.input_length) {
        (Some(body), _) => {
            let messages::Read { chat, reply, pictures } = messages::read(&body, folder)?;
            let kind = if pictures > 0 { Kind::Picture } else { Kind::Text };
            let reply = line.output_length.or(reply).unwrap_or(REPLY).max(1);
            ReplayRequest { kind, pause: Duration::ZERO, asked: Asked::Whole(Box::new(chat)), reply }
        }
        (None, Some(tokens)) => {
            let reply = line.output_length.ok_or("output_length is missing")?.max(1);
            ReplayRequest {
                kind: Kind::Text,
                pause: Duration::ZERO,
                asked: Asked::Tokens(hashed(&line.hash_ids, tokens)?),
                reply,
            }
        }
        (None, None) => return Err("input_length or messages is missing".to_owned()),
    };
    Ok(alone(at, turn))
}

/// Returns a prompt of `tokens` tokens with one piece for each hash. Without hashes, the prompt is
/// one piece of new tokens.
fn hashed(hashes: &[u64], tokens: usize) -> Result<Vec<Piece>, String> {
    if tokens == 0 {
        return Err("input_length is 0; expected at least 1".to_owned());
    }
    if hashes.is_empty() {
        return Ok(vec![Piece { seed: 0, tokens }]);
    }
    if hashes.len() != tokens.div_ceil(HASHED_TOKENS) {
        return Err(format!("{} hash ids for {tokens} tokens; expected one per {HASHED_TOKENS} tokens", hashes.len()));
    }
    let piece = |(block, seed): (usize, &u64)| Piece {
        // Shift the ids by 1, because a seed of 0 means new tokens each time.
        seed: seed.wrapping_add(1),
        tokens: HASHED_TOKENS.min(tokens - block * HASHED_TOKENS),
    };
    Ok(hashes.iter().enumerate().map(piece).collect())
}

fn seconds(seconds: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(seconds).ok()
}

fn alone(at: Duration, turn: ReplayRequest) -> Caller {
    Caller { at, tools: Vec::new(), system: None, turns: vec![turn] }
}

fn in_order(name: String, mut callers: Vec<Caller>) -> Arrivals {
    callers.sort_by_key(|caller| caller.at);
    Arrivals { name, callers }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIDE: PictureSource<'_> = PictureSource { folder: None, side: 28 };

    fn read(text: &str, pictures: &PictureSource<'_>) -> Result<Vec<Arrivals>, String> {
        let path = std::env::temp_dir().join(format!("bursar-trace-{}-{:p}.json", std::process::id(), text));
        fs::write(&path, text).expect("the file is written");
        let read = trace(&path, pictures).map_err(|failure| failure.error);
        fs::remove_file(&path).expect("the file is there");
        read
    }

    #[test]
    fn a_run_trace_is_read_with_times_lengths_and_pictures() {
        let text = r#"{"runs": [{"name": "4/s", "requests": [
            {"t": 0.5, "kind": "text", "prompt": 600, "out": 150, "file": "", "seed": 7},
            {"t": 0.25, "kind": "picture", "prompt": 0, "out": 100, "file": "p0000.jpg", "seed": 8}]}]}"#;
        let [run] = read(text, &SIDE).expect("the trace is valid").try_into().expect("one run");
        assert_eq!((&*run.name, run.requests(), run.rate()), ("4/s", 2, Some(4.0)));
        let turns: Vec<&ReplayRequest> = run.callers.iter().flat_map(|caller| &caller.turns).collect();
        assert_eq!((turns[0].kind, turns[0].reply, turns[1].kind), (Kind::Picture, 100, Kind::Text));
        assert!(matches!(&turns[1].asked, Asked::Tokens(pieces) if *pieces == [Piece { seed: 7, tokens: 600 }]));
        let pictures = |turn: &ReplayRequest| match &turn.asked {
            Asked::Said { pictures, .. } => pictures.clone(),
            other => panic!("{other:?}"),
        };
        assert_eq!(pictures(turns[0]), [ReplayPicture::Drawn { seed: 8, width: 28, height: 28 }]);
        let folder = PictureSource { folder: Some(Path::new("/pictures")), side: 28 };
        let [run] = read(text, &folder).expect("the trace is valid").try_into().expect("one run");
        assert_eq!(pictures(&run.callers[0].turns[0]), [ReplayPicture::File("/pictures/p0000.jpg".into())]);
    }

    #[test]
    fn equal_hash_ids_give_equal_tokens() {
        let text = "{\"timestamp\": 0, \"input_length\": 1100, \"output_length\": 9, \"hash_ids\": [0, 1, 2]}\n\n\
                    {\"timestamp\": 1500, \"input_length\": 600, \"output_length\": 2, \"hash_ids\": [0, 5]}\n\
                    {\"timestamp\": 1600, \"input_length\": 7, \"output_length\": 0}\n";
        let [run] = read(text, &SIDE).expect("the trace is valid").try_into().expect("one run");
        let pieces = |at: usize| match &run.callers[at].turns[0].asked {
            Asked::Tokens(pieces) => pieces.clone(),
            other => panic!("{other:?}"),
        };
        let lengths: Vec<usize> = pieces(0).iter().map(|piece| piece.tokens).collect();
        assert_eq!(lengths, [512, 512, 76]);
        assert_eq!(pieces(0)[0], pieces(1)[0], "equal hash ids give equal pieces");
        assert_ne!(pieces(0)[1].seed, pieces(1)[1].seed);
        assert_eq!((run.callers[1].at, run.callers[2].turns[0].reply), (Duration::from_millis(1500), 1));
    }

    #[test]
    fn openai_requests_are_replayed_unchanged() {
        let text = r#"{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"max_tokens": 12, "messages": [{"role": "user", "content": "Hello"}]}}
{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"type": "text", "text": "What?"}]}], "max_completion_tokens": 3}"#;
        let [run] = read(text, &SIDE).expect("the trace is valid").try_into().expect("one run");
        let facts = |at: usize| (run.callers[at].turns[0].kind, run.callers[at].turns[0].reply);
        assert_eq!((facts(0), facts(1)), ((Kind::Text, 12), (Kind::Picture, 3)));
        assert!(matches!(run.callers[0].turns[0].asked, Asked::Whole(_)));
    }

    #[test]
    fn log_times_are_relative_to_the_first_request() {
        let line = |at: u64| format!("{{\"timestamp\": {at}, \"input_length\": 7, \"output_length\": 1}}\n");
        let [run] = read(&(line(1_764_150_000_500) + &line(1_764_150_000_000)), &SIDE)
            .expect("the trace is valid")
            .try_into()
            .expect("one run");
        let at: Vec<Duration> = run.callers.iter().map(|caller| caller.at).collect();
        assert_eq!((at, run.rate()), (vec![Duration::ZERO, Duration::from_millis(500)], Some(4.0)));
    }

    #[test]
    fn an_invalid_trace_line_is_named() {
        let good = "{\"timestamp\": 0, \"input_length\": 7, \"output_length\": 1}\n";
        for (line, message) in [
            ("{\"timestamp\": 3}", "line 2: input_length or messages is missing"),
            ("{\"timestamp\": 3, \"input_length\": 3}", "line 2: output_length is missing"),
            (
                "{\"input_length\": 3, \"output_length\": 3}",
                "line 2: some lines have a timestamp, other lines have none",
            ),
            ("{\"timestamp\": -3, \"input_length\": 3}", "line 2: timestamp is not a time"),
            ("{\"timestamp\": 3, \"input_length\": 0, \"output_length\": 3}", "line 2: input_length is 0"),
            (
                "{\"timestamp\": 3, \"input_length\": 600, \"output_length\": 3, \"hash_ids\": [1]}",
                "line 2: 1 hash ids for 600 tokens",
            ),
            ("{\"timestamp\": 3, \"messages\": [{\"role\": \"robot\"}]}", "line 2: unknown role `robot`"),
            ("nothing", "line 2: expected"),
        ] {
            let error = read(&format!("{good}{line}"), &SIDE).expect_err(line);
            assert!(error.contains(message), "{error}");
        }
        assert!(read("", &SIDE).expect_err("an empty trace is refused").contains("no request"));
        let error = read("{\n  \"runs\": [{\"name\": \"a\", \"requests\": [}]\n}", &SIDE).expect_err("bad JSON");
        assert!(error.contains("line 2 column"), "{error}");
        let zero = r#"{"runs": [{"name": "a", "requests": [{"t": 0, "prompt": 0, "out": 1, "seed": 1}]}]}"#;
        assert!(read(zero, &SIDE).expect_err("an empty prompt").contains("request 0 of run a: prompt is 0"));
        assert!(read("{\"runs\": [{\"name\": 3}]}", &SIDE).expect_err("bad name").contains("invalid type"));
    }
}

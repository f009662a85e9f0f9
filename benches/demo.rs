//! The demo model: a step, an encoder batch and a sampling mask in isolation, and chats
//! through the whole runtime.
//!
//! `cargo bench --bench demo`

#[path = "common/photograph.rs"]
mod photograph;
#[path = "common/stage.rs"]
mod stage;

use bursar::{
    Bytes, Chat, ChatEvent, DeviceChoice, Image, ImageLimits, ModelHandle, ModelSource, OutputFormat, Runtime,
    RuntimeConfig,
};
use bursar_model::{
    flow::EncodedImage, processor::ImageProcessor, sampling::GrammarCompiler, sampling::Past, sampling::Sampler,
    sampling::SamplerScratch, sampling::SamplingParams, sampling::philox,
};
use divan::{Bencher, black_box};
use photograph::Photograph;
use stage::Stage;

fn main() {
    divan::main();
}

/// The number of CPU cores that the figures assume.
const THREADS: usize = 2;

/// The model without actors: the computation in which lanes spend their time.
mod model {
    use super::*;

    #[divan::bench(args = [1, 16])]
    fn decode_step_behind_256_tokens(bencher: Bencher, sequences: usize) {
        let stage = Stage::demo(THREADS);
        let batch = stage.decode_batch(sequences, 256);
        bencher.bench_local(|| stage.step(black_box(&batch)));
    }

    #[divan::bench]
    fn vision_launch_of_224_pixels(bencher: Bencher) {
        let stage = Stage::demo(THREADS);
        let processor: &ImageProcessor = stage.checkpoint.image_processor.as_ref().expect("the model takes pictures");
        let picture = EncodedImage::new(Photograph::draw(224, 224, 1).jpeg(85.0));
        let decoded = picture.decode(&ImageLimits::default()).expect("the picture was just encoded");
        let batch = stage.picture_batch(&processor.process(&decoded).expect("the picture is processed").image);
        bencher.bench_local(|| stage.encode(black_box(&batch)));
    }
}

/// Sampling a token from the demo's vocabulary, with and without a JSON schema.
mod sampling {
    use super::*;

    fn choose(bencher: Bencher, format: Option<OutputFormat>) {
        let stage = Stage::demo(1);
        let vocabulary = stage.model.config().decoder().vocabulary;
        let prompts = stage.checkpoint.prompts().expect("the demo has a tokenizer");
        let tokenizer = prompts.tokenizer();
        let mut sampler = Sampler::new(SamplingParams::default(), vocabulary).expect("defaults are valid");
        if let Some(format) = &format {
            let end = tokenizer.id_of("<|im_end|>").expect("the demo has an end token");
            let compiler = GrammarCompiler::new(tokenizer, vocabulary, &[end]).expect("a byte-level vocabulary");
            sampler = sampler.with_grammar(compiler.compile(format).expect("the schema compiles"));
        }
        let rows: Vec<Vec<f32>> = (0..24)
            .map(|step| (0..vocabulary as u64).map(|id| philox::uniform(step, id) as f32 * 8.0).collect())
            .collect();
        let mut scratch = SamplerScratch::default();
        // A reply from its start: the mask follows the produced tokens. The end token is chosen
        // only when no other token is allowed.
        bencher.bench_local(|| {
            let mut produced = Vec::new();
            for row in &rows {
                let token = sampler.sample(row, Past::new(&[], &produced), &mut scratch).expect("a token");
                produced.push(token.id);
            }
            produced
        });
    }

    #[divan::bench]
    fn free_24_tokens(bencher: Bencher) {
        choose(bencher, None);
    }

    #[divan::bench]
    fn json_schema_24_tokens(bencher: Bencher) {
        choose(bencher, Some(schema()));
    }
}

fn schema() -> OutputFormat {
    OutputFormat::json(serde_json::json!({
        "type": "array",
        "items": {"type": "object", "properties": {"shape": {"type": "string"}}, "required": ["shape"]},
        "minItems": 8,
    }))
}

/// Uses a host device even on a machine with a GPU, because the figures are for the host.
fn on_the_host() -> RuntimeConfig {
    RuntimeConfig { device: DeviceChoice::Host(Bytes::mib(512)), ..RuntimeConfig::default() }
}

/// The demo model in a separate runtime.
struct Served {
    threads: tokio::runtime::Runtime,
    runtime: Runtime,
    model: ModelHandle,
}

impl Served {
    fn start() -> Self {
        let threads = tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build();
        let threads = threads.expect("threads");
        let (runtime, model) = threads.block_on(async {
            let runtime = Runtime::start(on_the_host()).await.expect("a host device starts");
            let model = runtime.load(ModelSource::demo()).await.expect("the demo starts");
            (runtime, model)
        });
        Served { threads, runtime, model }
    }

    /// Reads a reply until its first text and cancels the rest.
    fn first_text(&self, chat: Chat) {
        self.threads.block_on(async {
            let mut reply = self.model.chat(chat).await.expect("the chat is accepted");
            while let Some(event) = reply.next().await {
                if matches!(event.expect("the reply has no error"), ChatEvent::Text(_)) {
                    return;
                }
            }
            panic!("the reply has no text");
        });
    }

    fn text(&self, chat: Chat) -> String {
        self.threads.block_on(async { self.model.chat(chat).await?.text().await }).expect("the model answers")
    }

    /// Sends all chats concurrently and reads whole replies.
    fn at_once(&self, chats: Vec<Chat>) {
        self.threads.block_on(async {
            let mut asked = tokio::task::JoinSet::new();
            for chat in chats {
                let model = self.model.clone();
                asked.spawn(async move { model.chat(chat).await?.text().await });
            }
            while let Some(answered) = asked.join_next().await {
                answered.expect("the task does not panic").expect("the model answers");
            }
        });
    }

    /// Sends each chat after the previous chat has ended.
    fn in_turn(&self, chats: Vec<Chat>) {
        chats.into_iter().for_each(|chat| drop(self.text(chat)));
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.threads.block_on(self.runtime.clone().shutdown());
    }
}

/// A number that no earlier chat has used, so that no cache has content for it.
fn fresh() -> u32 {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

fn new_picture() -> Image {
    Image::from_bytes(Photograph::draw(224, 224, fresh()).jpeg(85.0))
}

fn about(picture: Image) -> Chat {
    Chat::new().user("Describe the picture.").image(picture).temperature(0.0)
}

/// A chat with a unique picture and a reply of exactly 24 tokens.
fn work() -> Chat {
    about(new_picture()).max_tokens(24).ignore_end()
}

/// Chats through the runtime, as a program would send them.
mod chats {
    use super::*;

    #[divan::bench]
    fn first_text_of_a_224_pixel_picture(bencher: Bencher) {
        let served = Served::start();
        bencher.with_inputs(|| about(new_picture())).bench_local_values(|chat| served.first_text(chat));
    }

    #[divan::bench]
    fn first_text_of_a_picture_that_is_known(bencher: Bencher) {
        let served = Served::start();
        let picture = new_picture();
        bencher.with_inputs(|| about(picture.clone())).bench_local_values(|chat| served.first_text(chat));
    }

    #[divan::bench(sample_count = 5)]
    fn chats_64_at_once(bencher: Bencher) {
        let served = Served::start();
        let chats = || (0..64).map(|_| work()).collect::<Vec<_>>();
        bencher.with_inputs(chats).bench_local_values(|chats| served.at_once(chats));
    }

    #[divan::bench(sample_count = 5)]
    fn chats_64_in_turn(bencher: Bencher) {
        let served = Served::start();
        let chats = || (0..64).map(|_| work()).collect::<Vec<_>>();
        bencher.with_inputs(chats).bench_local_values(|chats| served.in_turn(chats));
    }

    /// A first turn of about 500 tokens with a unique beginning, and the chat with its answer
    /// and a second question.
    fn second_turn(number: u32) -> (Chat, Chat) {
        let long = format!("{number} squares and circles. ") + &"Say what is red, what is green. ".repeat(40);
        let first = Chat::new().user(long).temperature(0.0).max_tokens(1);
        let second = first.clone().assistant("A square.").user("And now?");
        (first, second)
    }

    #[divan::bench(sample_count = 40)]
    fn second_turn_whose_first_is_cached(bencher: Bencher) {
        let served = Served::start();
        let asked = || {
            let (first, second) = second_turn(fresh());
            served.text(first);
            second
        };
        bencher.with_inputs(asked).bench_local_values(|chat| served.first_text(chat));
    }

    #[divan::bench(sample_count = 40)]
    fn second_turn_whose_first_is_not(bencher: Bencher) {
        let served = Served::start();
        bencher.with_inputs(|| second_turn(fresh()).1).bench_local_values(|chat| served.first_text(chat));
    }

    #[divan::bench(sample_count = 20)]
    fn reply_of_24_tokens(bencher: Bencher) {
        let served = Served::start();
        let chat = || Chat::new().user("Say what is red.").temperature(0.0).max_tokens(24).min_tokens(24);
        bencher.with_inputs(chat).bench_local_values(|chat| served.text(chat));
    }

    #[divan::bench(sample_count = 20)]
    fn reply_of_24_tokens_by_a_json_schema(bencher: Bencher) {
        let served = Served::start();
        let chat = || {
            let chat = Chat::new().user("Say what is red.").temperature(0.0);
            chat.max_tokens(24).min_tokens(24).format(schema())
        };
        bencher.with_inputs(chat).bench_local_values(|chat| served.text(chat));
    }
}

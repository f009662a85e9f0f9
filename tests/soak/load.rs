//! The chats of a soak: their kinds, and how they are cancelled. A seed
//! decides everything except scheduling.

use std::{io::Cursor, time::Duration};

use bursar::{Chat, ChatError, Image, ModelHandle, OutputFormat, Reply, Video};
use image::{ImageFormat, Rgb, RgbImage};
use serde_json::json;
use tokio::task::JoinSet;

use crate::stage::{picture, text};

#[derive(Clone, Copy, Debug, Default)]
pub struct Ends {
    /// Chats that ended by themselves.
    pub finished: usize,
    /// Chats whose caller disconnected before the end.
    pub cancelled: usize,
    /// Chats that missed their deadline.
    pub late: usize,
    /// Chats that exceeded the request limit.
    pub overloaded: usize,
    /// Invalid chats, which were refused.
    pub refused: usize,
    /// Chats whose reply was known before.
    pub compared: usize,
    /// Chats with a known reply that gave a different reply.
    pub differing: usize,
}

/// The end of a chat without an error.
enum End {
    Finished,
    Cancelled,
    /// The reply differs from the known reply.
    Differing,
}

/// When a caller disconnects.
#[derive(Clone, Copy, Debug)]
enum Disconnect {
    Never,
    /// Disconnects after this many events.
    AfterEvents(usize),
    /// Disconnects after this time, in whatever state the request is then: not accepted yet,
    /// waiting for its picture, or in a step.
    AfterTime(Duration),
}

/// Starts chats one after another, and keeps several of them running concurrently.
pub struct Load {
    models: Vec<ModelHandle>,
    /// Greedy chats with their replies. They are repeated from time to time.
    known: Vec<(Chat, String)>,
    random: Random,
    asked: usize,
    ends: Ends,
}

impl Load {
    pub fn new(models: Vec<ModelHandle>, seed: u64) -> Self {
        Load { models, known: Vec::new(), random: Random(seed), asked: 0, ends: Ends::default() }
    }

    /// Sends some greedy chats whose replies must stay the same whatever happens. The chats have
    /// priorities, tenants and pictures, and some are turns of a conversation.
    pub async fn with_known_replies(mut self) -> Self {
        let model = self.models[0].clone();
        for number in 0..8 {
            let mut chat = text("Describe the picture.").image(picture(number)).max_tokens(24).ignore_end();
            let first = crate::stage::answer(&model, chat.clone()).await;
            if number % 2 == 1 {
                chat = chat.assistant(&first).user(format!("And {number}?"));
            }
            let reply = crate::stage::answer(&model, chat.clone()).await;
            let urgency = [0, 2, -1][number as usize % 3];
            self.known.push((chat.priority(urgency).tenant(["a", "b"][number as usize % 2]), reply));
        }
        self
    }

    pub fn asked(&self) -> usize {
        self.asked
    }

    pub fn ends(&self) -> Ends {
        self.ends
    }

    /// Sends `count` more chats, `at_once` of them concurrently, and waits until all of them have
    /// ended.
    pub async fn run(&mut self, count: usize, at_once: usize) {
        let mut running = JoinSet::new();
        for _ in 0..count {
            while running.len() == at_once {
                let overloaded = self.ends.overloaded;
                self.note(running.join_next().await);
                // After a request was refused because of the limit, the next request is sent only
                // when another request has ended.
                if self.ends.overloaded > overloaded && !running.is_empty() {
                    self.note(running.join_next().await);
                }
            }
            self.asked += 1;
            let model = self.models[self.asked % self.models.len()].clone();
            if !self.known.is_empty() && self.random.below(3) == 0 {
                let (chat, expected) = self.known[self.random.below(self.known.len())].clone();
                self.ends.compared += 1;
                running.spawn(async move {
                    let text = model.chat(chat).await?.text().await?;
                    Ok(if text == expected { End::Finished } else { End::Differing })
                });
                continue;
            }
            let (chat, samples) = self.chat();
            running.spawn(ask(model, chat, samples, self.disconnect()));
        }
        while let Some(ended) = running.join_next().await {
            self.note(Some(ended));
        }
    }

    fn note(&mut self, ended: Option<Result<Result<End, ChatError>, tokio::task::JoinError>>) {
        match ended.expect("a request is in progress").expect("no request panics") {
            Ok(End::Finished) => self.ends.finished += 1,
            Ok(End::Cancelled) => self.ends.cancelled += 1,
            Ok(End::Differing) => self.ends.differing += 1,
            Err(ChatError::TooLate { .. }) => self.ends.late += 1,
            Err(ChatError::Overloaded { .. }) => self.ends.overloaded += 1,
            Err(ChatError::TooLong { .. } | ChatError::Media(_) | ChatError::Vision(_)) => {
                self.ends.refused += 1;
            }
            Err(error) => panic!("unexpected end of a chat: {error:?}"),
        }
    }

    fn disconnect(&mut self) -> Disconnect {
        match self.random.below(8) {
            0..5 => Disconnect::Never,
            5 => Disconnect::AfterEvents(self.random.below(8)),
            // Log-uniform from 32 us to 131 ms: most callers leave early in the reply.
            _ => Disconnect::AfterTime(Duration::from_micros(1 << (5 + self.random.below(13)))),
        }
    }

    /// The next kind of chat, with its number of samples.
    fn chat(&mut self) -> (Chat, usize) {
        let number = self.asked as u32;
        let own = 1000 + number;
        let chat = match self.random.below(11) {
            0 => text("Who are you?"),
            1 => text(&format!("Count from {number} on, please.")).temperature(2.0).top_k(0).top_p(1.0).seed(1),
            // Pictures that other chats use too.
            2 => text("Describe the picture.").image(picture(number % 7)),
            3 => text("Describe the picture.").image(picture(number % 3)).image(picture(number % 7)),
            4 => text("Describe the picture.").image(drawing(own)),
            5 => text("What happens?").video(Video::from_frames((0..4).map(|frame| drawing(own + frame)), 2.0)),
            6 => return (text("Describe the picture.").image(drawing(own)).temperature(1.0), 3),
            7 => text("Describe the picture.").image(picture(number % 7)).format(self.format()),
            8 => text("Say what is red.").log_probabilities(2).prompt_log_probabilities(1),
            9 => text("Describe the picture.").image(drawing(own)).deadline(Duration::from_millis(number as u64 % 40)),
            _ => self.bad(),
        };
        // Short and long replies.
        (chat.max_tokens(1 + self.random.below(48)), 1)
    }

    fn format(&mut self) -> OutputFormat {
        match self.random.below(3) {
            0 => OutputFormat::Regex("[0-9]{3}-[a-f]{2}".into()),
            1 => OutputFormat::Choice(vec!["red".into(), "green".into()]),
            _ => OutputFormat::json(json!({"type": "object", "properties": {"count": {"type": "integer"}}})),
        }
    }

    /// Chats that are refused: a prompt that is too long, a file that is not a picture, a truncated
    /// picture, and a damaged JPEG.
    fn bad(&mut self) -> Chat {
        let about = |file: Vec<u8>| text("Describe the picture.").image(Image::from_bytes(file));
        match self.random.below(4) {
            0 => text(&"Say what is red. ".repeat(200)),
            1 => about(b"no picture".to_vec()),
            2 => {
                let whole = drawn(7, ImageFormat::Png);
                about(whole[..whole.len() / 2].to_vec())
            }
            _ => {
                let mut file = drawn(7, ImageFormat::Jpeg);
                // Damage the Huffman tables. libjpeg notices the damage while it decodes.
                let table = file.windows(2).position(|pair| pair == [0xff, 0xc4]).expect("a JPEG has tables");
                file[table + 5..table + 21].fill(0xff);
                about(file)
            }
        }
    }
}

/// A picture that no other chat uses: a PNG for an even number, a JPEG for an odd number.
fn drawing(number: u32) -> Image {
    Image::from_bytes(drawn(number, if number.is_multiple_of(2) { ImageFormat::Png } else { ImageFormat::Jpeg }))
}

fn drawn(number: u32, format: ImageFormat) -> Vec<u8> {
    let colour = Rgb([(number % 251) as u8, (number / 251 % 251) as u8, (number / 63_001) as u8 + 100]);
    let picture = RgbImage::from_fn(56, 56, |x, y| match (x / 8 + y / 8) % 2 {
        0 => colour,
        _ => Rgb([20, 20, 30]),
    });
    let mut encoded = Cursor::new(Vec::new());
    picture.write_to(&mut encoded, format).expect("a picture can be written to memory");
    encoded.into_inner()
}

async fn ask(model: ModelHandle, chat: Chat, samples: usize, disconnect: Disconnect) -> Result<End, ChatError> {
    let read = async {
        let mut ended = true;
        for reply in model.samples(chat, samples).await? {
            ended &= read_reply(reply, disconnect).await?;
        }
        Ok(if ended { End::Finished } else { End::Cancelled })
    };
    match disconnect {
        Disconnect::AfterTime(time) => tokio::time::timeout(time, read).await.unwrap_or(Ok(End::Cancelled)),
        Disconnect::Never | Disconnect::AfterEvents(_) => read.await,
    }
}

/// Reads a reply. Returns whether it reached its end.
async fn read_reply(mut reply: Reply, disconnect: Disconnect) -> Result<bool, ChatError> {
    let mut tokens = 0;
    loop {
        if matches!(disconnect, Disconnect::AfterEvents(events) if tokens >= events) {
            return Ok(false);
        }
        match reply.next().await {
            Some(event) => drop(event?),
            None => return Ok(true),
        }
        tokens += 1;
    }
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % end as u64) as usize
    }
}

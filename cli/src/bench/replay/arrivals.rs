//! Pure: the requests of a replay, their callers and their times.

use std::{path::PathBuf, time::Duration};

use bursar::Chat;
use serde_json::Value;

use super::super::draw::Rng;

/// Requests that are replayed together, either from a trace or drawn at random.
#[derive(Clone, Debug)]
pub struct Arrivals {
    pub name: String,
    /// Sorted by the time of the first request.
    pub callers: Vec<Caller>,
}

/// A caller, which sends one request after another.
#[derive(Clone, Debug)]
pub struct Caller {
    /// Time of the first request, from the start of the run.
    pub at: Duration,
    /// The functions that the caller offers to the model.
    pub tools: Vec<Value>,
    pub system: Option<String>,
    pub turns: Vec<ReplayRequest>,
}

#[derive(Clone, Debug)]
pub struct ReplayRequest {
    /// Figures are reported by kind.
    pub kind: Kind,
    /// Time from the end of the previous reply to this request.
    pub pause: Duration,
    pub asked: Asked,
    /// Tokens of the reply. End-of-text tokens do not end it earlier.
    pub reply: usize,
}

/// Content that a turn adds to the conversation.
#[derive(Clone, Debug)]
pub enum Asked {
    /// A prompt of random tokens: the concatenation of these pieces.
    Tokens(Vec<Piece>),
    /// A complete request, which replaces the conversation so far.
    Whole(Box<Chat>),
    /// A user turn. Its pictures precede its text.
    Said { text: String, pictures: Vec<ReplayPicture> },
    /// The result of a function. `call` is added to the conversation as if the model had made it.
    /// If the model's template does not show tools, only `text` is added, as a user turn.
    Result { call: Value, text: String, pictures: Vec<ReplayPicture> },
}

/// A sequence of random tokens. Pieces with the same seed have the same tokens in all requests. A
/// seed of 0 gives new tokens each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub seed: u64,
    pub tokens: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplayPicture {
    /// A file, which is read before the run starts.
    File(PathBuf),
    Drawn {
        seed: u64,
        width: u32,
        height: u32,
    },
}

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The request adds only text, possibly after a history with pictures.
    Text,
    /// The request shows a new picture. A complete request counts as this kind if it contains any
    /// picture.
    Picture,
}

impl Kind {
    pub const ALL: [Kind; 2] = [Kind::Text, Kind::Picture];

    pub fn name(self) -> &'static str {
        match self {
            Kind::Text => "text",
            Kind::Picture => "picture",
        }
    }
}

impl Arrivals {
    pub fn requests(&self) -> usize {
        self.callers.iter().map(|caller| caller.turns.len()).sum()
    }

    /// Returns requests per second, from the start to the last caller's first request. `None` if
    /// all callers start at 0.
    pub fn rate(&self) -> Option<f64> {
        let last = self.callers.last()?.at.as_secs_f64();
        (last > 0.0).then(|| self.requests() as f64 / last)
    }

    /// Scales all arrival times by one factor, so that `rate` requests arrive per second. If the
    /// trace has no times, draws independent arrival times from the seed.
    pub fn at_rate(mut self, rate: f64, seed: u64) -> Self {
        match self.rate() {
            Some(own) => self.callers.iter_mut().for_each(|caller| caller.at = caller.at.mul_f64(own / rate)),
            None => self.spread(self.requests() as f64 / rate, &mut Rng::new(seed)),
        }
        self.name = format!("{} at {rate}/s", self.name);
        self
    }

    /// Spreads the callers over this many seconds, at independent times (a Poisson process
    /// conditioned on its number of arrivals).
    pub fn spread(&mut self, seconds: f64, draw: &mut Rng) {
        self.callers.iter_mut().for_each(|caller| caller.at = Duration::from_secs_f64(draw.share() * seconds));
        self.callers.sort_by_key(|caller| caller.at);
    }

    /// Truncates prompts of random tokens so that each prompt and its reply fit the context.
    /// Returns the number of truncated prompts.
    pub fn cut_to(&mut self, context_tokens: usize) -> usize {
        let mut cut = 0;
        for turn in self.callers.iter_mut().flat_map(|caller| &mut caller.turns) {
            let Asked::Tokens(pieces) = &mut turn.asked else { continue };
            let most = context_tokens.saturating_sub(turn.reply).max(1);
            let mut left = most;
            let before: usize = pieces.iter().map(|piece| piece.tokens).sum();
            pieces.retain_mut(|piece| {
                piece.tokens = piece.tokens.min(left);
                left -= piece.tokens;
                piece.tokens > 0
            });
            cut += usize::from(before > most);
        }
        cut
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(seconds: f64, pieces: &[usize], reply: usize) -> Caller {
        let piece = |(seed, tokens): (usize, &usize)| Piece { seed: seed as u64, tokens: *tokens };
        let asked = Asked::Tokens(pieces.iter().enumerate().map(piece).collect());
        let turn = ReplayRequest { kind: Kind::Text, pause: Duration::ZERO, asked, reply };
        Caller { at: Duration::from_secs_f64(seconds), tools: Vec::new(), system: None, turns: vec![turn] }
    }

    #[test]
    fn a_new_rate_scales_all_arrival_times() {
        let callers = vec![caller(1.0, &[5], 1), caller(3.0, &[5], 1), caller(4.0, &[5], 1), caller(8.0, &[5], 1)];
        let arrivals = Arrivals { name: "a day".to_owned(), callers };
        assert_eq!(arrivals.rate(), Some(0.5));
        let faster = arrivals.at_rate(2.0, 7);
        let at: Vec<f64> = faster.callers.iter().map(|caller| caller.at.as_secs_f64()).collect();
        assert_eq!((&*faster.name, at), ("a day at 2/s", vec![0.25, 0.75, 1.0, 2.0]));
    }

    #[test]
    fn requests_without_times_arrive_at_the_given_rate() {
        let arrivals = Arrivals { name: "a batch".to_owned(), callers: vec![caller(0.0, &[5], 1); 400] };
        assert_eq!(arrivals.rate(), None);
        let spread = arrivals.clone().at_rate(8.0, 7);
        let rate = spread.rate().expect("the trace has arrival times");
        assert!((7.9..8.4).contains(&rate) && spread.name == "a batch at 8/s", "{rate}");
        let at = |arrivals: Arrivals| arrivals.callers.iter().map(|caller| caller.at).collect::<Vec<_>>();
        assert!(at(spread.clone()).is_sorted() && at(spread) == at(arrivals.at_rate(8.0, 7)), "same seed, same times");
    }

    #[test]
    fn prompts_beyond_the_limit_are_truncated() {
        let mut arrivals =
            Arrivals { name: String::new(), callers: vec![caller(0.0, &[60, 60], 20), caller(1.0, &[60], 40)] };
        assert_eq!(arrivals.cut_to(100), 1);
        let pieces = |at: usize| match &arrivals.callers[at].turns[0].asked {
            Asked::Tokens(pieces) => pieces.iter().map(|piece| piece.tokens).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        assert_eq!((pieces(0), pieces(1)), (vec![60, 20], vec![60]));
    }
}

//! Pure: synthetic requests that resemble requests of people and of programs, drawn from a seed.

use std::time::Duration;

use clap::ValueEnum;
use serde_json::{Value, json};

use super::{
    super::draw::Rng,
    arrivals::{Arrivals, Asked, Caller, Kind, Piece, ReplayPicture, ReplayRequest},
};

/// The kind of synthetic requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Synthetic {
    /// Conversations of text, one to six turns under one system prompt.
    Chat,
    /// A picture in each conversation, and one to three questions about it.
    Images,
    /// Single requests. 60 % have a text prompt with a lognormal length around 600 tokens and a
    /// reply of around 150 tokens. 40 % have a picture and a reply of around 100 tokens.
    Mixed,
    /// Programs that call tools four to ten times. Each has one of four long system prompts. Tool
    /// results have around 400 words, and every third result has a picture that stays in the
    /// history. Replies have around 60 tokens.
    Agents,
}

/// The amount and sizes of drawn requests.
#[derive(Clone, Copy, Debug)]
pub struct Amount {
    /// Mean number of requests that arrive per second.
    pub rate: f64,
    pub seconds: f64,
    /// Side of a picture, in pixels.
    pub side: u32,
    /// Divisor of the default lengths of texts, replies and pauses.
    pub shortened: f64,
}

/// Number of different programs. All callers of one program share its system prompt and tools.
const AGENTS: u32 = 4;

impl Synthetic {
    pub fn name(self) -> &'static str {
        match self {
            Synthetic::Chat => "chat",
            Synthetic::Images => "images",
            Synthetic::Mixed => "mixed",
            Synthetic::Agents => "agents",
        }
    }

    /// Draws callers until they have as many requests as should arrive in `amount.seconds`, and
    /// spreads the callers over that time.
    pub fn arrivals(self, amount: Amount, seed: u64) -> Arrivals {
        let mut draw = Rng::new(seed ^ 0x5ee7_ab1e ^ self as u64);
        let wanted = (amount.rate * amount.seconds).ceil().max(1.0) as usize;
        let (mut callers, mut requests) = (Vec::new(), 0);
        while requests < wanted {
            let caller = self.caller(&mut draw, amount);
            requests += caller.turns.len();
            callers.push(caller);
        }
        let mut arrivals = Arrivals { name: format!("{} {}/s", self.name(), amount.rate), callers };
        arrivals.spread(amount.seconds, &mut draw);
        arrivals
    }

    fn caller(self, draw: &mut Rng, amount: Amount) -> Caller {
        let mut drawing = Drawing { draw, amount };
        let at = Duration::ZERO;
        match self {
            Synthetic::Mixed => {
                let turn = if drawing.draw.share() <= 0.4 { drawing.picture(100.0) } else { drawing.tokens() };
                Caller { at, tools: Vec::new(), system: None, turns: vec![turn] }
            }
            Synthetic::Chat => {
                let count = 1 + drawing.draw.below(6);
                let turns = (0..count).map(|turn| drawing.question(turn, 40.0, 150.0)).collect();
                // All callers share one system prompt.
                let system = Some(words(&mut Rng::new(1), drawing.length(200.0, 0.0, 8, 400)));
                Caller { at, tools: Vec::new(), system, turns }
            }
            Synthetic::Images => {
                let count = drawing.draw.below(3);
                let first = drawing.picture(100.0);
                let later = (1..=count).map(|turn| drawing.question(turn, 15.0, 60.0));
                Caller { at, tools: Vec::new(), system: None, turns: [first].into_iter().chain(later).collect() }
            }
            Synthetic::Agents => {
                let agent = u64::from(drawing.draw.below(AGENTS));
                let calls = 4 + drawing.draw.below(7);
                let first = drawing.question(0, 60.0, 60.0);
                let later = (1..=calls).map(|turn| drawing.result(turn));
                let turns = [first].into_iter().chain(later).collect();
                let system = Some(words(&mut Rng::new(100 + agent), drawing.length(1200.0, 0.0, 16, 1200)));
                Caller { at, tools: tools(), system, turns }
            }
        }
    }
}

struct Drawing<'d> {
    draw: &'d mut Rng,
    amount: Amount,
}

impl Drawing<'_> {
    fn length(&mut self, middle: f64, spread: f64, least: usize, most: usize) -> usize {
        let shortened = |length: usize| ((length as f64 / self.amount.shortened) as usize).max(1);
        self.draw.lognormal(middle / self.amount.shortened, spread, shortened(least), shortened(most))
    }

    /// Draws the time until a reader or a program sends the next request. `middle` is
    /// the median in seconds.
    fn pause(&mut self, middle: f64) -> Duration {
        let milliseconds = self.length(1e3 * middle, 0.7, 10, 30_000);
        Duration::from_millis(milliseconds as u64)
    }

    fn tokens(&mut self) -> ReplayRequest {
        let tokens = self.length(600.0, 0.9, 50, 6000);
        let asked = Asked::Tokens(vec![Piece { seed: self.draw.next(), tokens }]);
        let reply = self.length(150.0, 0.7, 8, 512);
        ReplayRequest { kind: Kind::Text, pause: Duration::ZERO, asked, reply }
    }

    fn drawn(&mut self) -> ReplayPicture {
        ReplayPicture::Drawn { seed: self.draw.next(), width: self.amount.side, height: self.amount.side }
    }

    fn picture(&mut self, reply: f64) -> ReplayRequest {
        let asked = Asked::Said { text: "Describe.".to_owned(), pictures: vec![self.drawn()] };
        ReplayRequest { kind: Kind::Picture, pause: Duration::ZERO, asked, reply: self.length(reply, 0.4, 16, 256) }
    }

    fn question(&mut self, turn: u32, length: f64, reply: f64) -> ReplayRequest {
        let count = self.length(length, 0.8, 4, 2000);
        let pause = if turn == 0 { Duration::ZERO } else { self.pause(3.0) };
        let asked = Asked::Said { text: words(self.draw, count), pictures: Vec::new() };
        ReplayRequest { kind: Kind::Text, pause, asked, reply: self.length(reply, 0.7, 8, 512) }
    }

    fn result(&mut self, turn: u32) -> ReplayRequest {
        let shows = turn.is_multiple_of(3);
        let count = self.length(400.0, 0.8, 8, 2000);
        let call = json!({ "type": "function", "function": { "name": "open", "arguments": { "place": words(self.draw, 3) } } });
        let pictures = if shows { vec![self.drawn()] } else { Vec::new() };
        let text = words(self.draw, count);
        let kind = if shows { Kind::Picture } else { Kind::Text };
        let asked = Asked::Result { call, text, pictures };
        ReplayRequest { kind, pause: self.pause(0.3), asked, reply: self.length(60.0, 0.7, 8, 512) }
    }
}

/// Returns six functions that a program offers to the model.
fn tools() -> Vec<Value> {
    let tool = |name: &str| {
        json!({ "type": "function", "function": {
            "name": name,
            "description": format!("Does what its name says: {name}."),
            "parameters": {
                "type": "object",
                "properties": { "place": { "type": "string", "description": "Where." }, "count": { "type": "integer" } },
                "required": ["place"],
            },
        } })
    };
    ["open", "click", "write", "search", "scroll", "wait"].map(tool).to_vec()
}

/// Returns this many common words. Each is one token in most vocabularies.
fn words(draw: &mut Rng, count: usize) -> String {
    const WORDS: [&str; 32] = [
        "the", "red", "boat", "under", "quiet", "paper", "north", "glass", "water", "seven", "morning", "house",
        "with", "a", "long", "road", "and", "people", "who", "know", "where", "every", "small", "light", "comes",
        "from", "before", "rain", "falls", "over", "our", "city",
    ];
    let drawn: Vec<&str> = (0..count).map(|_| WORDS[draw.below(WORDS.len() as u32) as usize]).collect();
    drawn.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const AMOUNT: Amount = Amount { rate: 12.0, seconds: 60.0, side: 1036, shortened: 1.0 };

    #[test]
    fn the_same_seed_draws_the_same_requests() {
        for kind in Synthetic::value_variants() {
            let [one, same, other] = [5, 5, 6].map(|seed| format!("{:?}", kind.arrivals(AMOUNT, seed)));
            assert!(one == same && one != other, "{kind:?}");
        }
    }

    #[test]
    fn a_synthetic_trace_has_the_requested_number_of_requests() {
        for kind in Synthetic::value_variants() {
            let arrivals = kind.arrivals(AMOUNT, 3);
            let requests = arrivals.requests();
            assert!((720..=730).contains(&requests), "{kind:?}: {requests}");
            assert!(arrivals.callers.is_sorted_by_key(|caller| caller.at), "{kind:?}");
            assert!(arrivals.callers.iter().all(|caller| caller.at <= Duration::from_secs(60)), "{kind:?}");
        }
    }

    #[test]
    fn mixed_requests_match_the_statistics_of_the_original_trace() {
        let arrivals = Synthetic::Mixed.arrivals(Amount { seconds: 300.0, ..AMOUNT }, 1);
        let turns: Vec<&ReplayRequest> = arrivals.callers.iter().flat_map(|caller| &caller.turns).collect();
        let texts: Vec<usize> = turns
            .iter()
            .filter_map(|turn| match &turn.asked {
                Asked::Tokens(pieces) => Some(pieces[0].tokens),
                _ => None,
            })
            .collect();
        let share = texts.len() as f64 / turns.len() as f64;
        assert!((0.57..0.63).contains(&share), "{share}");
        let short = texts.iter().filter(|tokens| **tokens < 600).count() as f64 / texts.len() as f64;
        assert!((0.46..0.54).contains(&short), "{short}");
        assert!(turns.iter().all(|turn| turn.pause.is_zero()));
    }

    #[test]
    fn agent_conversations_have_pictures_and_shared_system_prompts() {
        let arrivals = Synthetic::Agents.arrivals(AMOUNT, 1);
        for caller in &arrivals.callers {
            assert!((5..=11).contains(&caller.turns.len()) && caller.tools.len() == 6);
            let shown = caller.turns.iter().filter(|turn| turn.kind == Kind::Picture).count();
            assert_eq!(shown, (caller.turns.len() - 1) / 3);
        }
        let systems: std::collections::BTreeSet<_> = arrivals.callers.iter().map(|caller| &caller.system).collect();
        assert_eq!(systems.len(), AGENTS as usize, "callers of one program share its system prompt");
    }
}

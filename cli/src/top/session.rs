//! Pure: the state of the view: the latest scrapes and events, and the effects of keys.

use std::{
    collections::{BTreeMap, VecDeque},
    rc::Rc,
    time::Duration,
};

use super::{
    keys::Key,
    rate::Since,
    scrape::{Scrape, ScrapeError},
    view::View,
};

/// Time window of quantiles and shares.
const MINUTE: Duration = Duration::from_secs(60);
/// Minimum time window of quantiles and shares. A shorter window is not representative, so totals
/// are shown instead.
const SHORTEST: Duration = Duration::from_secs(5);
/// Minimum time between the scrapes that are kept for the last minute.
const APART: Duration = Duration::from_secs(1);
/// Number of rates kept for the sparkline: five minutes at one scrape per second.
const TRAIL: usize = 300;
/// How long a restart stays on the screen.
const TOLD: Duration = Duration::from_secs(30);
/// The intervals that `+` and `-` step through.
const INTERVALS: [Duration; 8] = [
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
    Duration::from_secs(30),
];

/// A scrape and its time.
#[derive(Debug)]
struct TimedScrape {
    at: Duration,
    scrape: Scrape,
}

/// The reason why there is no newer scrape.
#[derive(Clone, Debug, PartialEq)]
pub struct Lost {
    /// Time of the first failed scrape, from the start of the session.
    pub since: Duration,
    pub error: ScrapeError,
}

/// Tokens per second of one model, the oldest value first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trail {
    pub generated: VecDeque<f64>,
    pub prompt: VecDeque<f64>,
}

/// How much of the full view fits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Viewport {
    /// Terminal rows between the first line and the last line of the screen.
    pub rows: usize,
    /// Lines of the full view.
    pub lines: usize,
}

impl Viewport {
    /// Returns the first line of the last page.
    pub fn last_top(self) -> usize {
        self.lines.saturating_sub(self.rows)
    }

    /// Returns the number of lines that a page scrolls. One line of the
    /// previous page stays visible.
    fn page(self) -> usize {
        self.rows.saturating_sub(1).max(1)
    }
}

/// The state of one `bursar top` session.
#[derive(Debug)]
pub struct Session {
    /// The address that is scraped.
    pub address: String,
    /// The time between scrapes.
    pub every: Duration,
    /// Whether scraping is paused.
    pub is_paused: bool,
    /// Whether the help is open.
    pub shows_help: bool,
    /// First visible line of the full view. `None` in the fitted view.
    pub top: Option<usize>,
    /// How much of the full view fit when the screen was last drawn.
    pub viewport: Viewport,
    latest: Option<Rc<TimedScrape>>,
    /// Scrapes of the last minute, the oldest first, without the latest scrape.
    earlier: VecDeque<Rc<TimedScrape>>,
    lost: Option<Lost>,
    began_anew: Option<Duration>,
    view: Option<View>,
    trails: BTreeMap<String, Trail>,
    chosen: Option<String>,
}

impl Session {
    /// Creates a session without scrapes.
    pub fn new(address: String, every: Duration) -> Self {
        Session {
            address,
            every,
            is_paused: false,
            shows_help: false,
            top: None,
            viewport: Viewport::default(),
            latest: None,
            earlier: VecDeque::new(),
            lost: None,
            began_anew: None,
            view: None,
            trails: BTreeMap::new(),
            chosen: None,
        }
    }

    /// Records the result of a scrape.
    pub fn record(&mut self, scraped: Result<Scrape, ScrapeError>, at: Duration) {
        match scraped {
            Err(error) => {
                let since = self.lost.as_ref().map_or(at, |lost| lost.since);
                self.lost = Some(Lost { since, error });
            }
            Ok(scrape) => self.see(TimedScrape { at, scrape }),
        }
    }

    fn see(&mut self, seen: TimedScrape) {
        self.lost = None;
        let went_back = |before: &Rc<TimedScrape>| is_another(&seen.scrape, &before.scrape);
        if self.latest.as_ref().is_some_and(went_back) {
            // Counts of another process cannot be compared with the counts of this process, so drop
            // the earlier scrapes.
            (self.latest, self.began_anew) = (None, Some(seen.at));
            self.earlier.clear();
            self.trails.clear();
        }
        let last = self.latest.as_ref().and_then(|last| since(last, seen.at));
        // After a pause, there may be no scrape from a minute ago.
        let is_a_minute_ago = |earlier: &&Rc<TimedScrape>| earlier.at + MINUTE <= seen.at;
        let first = self.earlier.iter().rfind(is_a_minute_ago).or(self.earlier.front()).or(self.latest.as_ref());
        let minute = first.and_then(|first| since(first, seen.at));
        let is_about_one = |seconds: f64| (SHORTEST.as_secs_f64()..2.0 * MINUTE.as_secs_f64()).contains(&seconds);
        let minute = minute.filter(|minute| is_about_one(minute.seconds));
        let view = View::of(&seen.scrape, last, minute);
        self.keep_trails(&view);
        self.view = Some(view);
        let seen = Rc::new(seen);
        let before = self.latest.replace(seen.clone());
        self.keep(before, seen.at);
    }

    fn keep(&mut self, before: Option<Rc<TimedScrape>>, now: Duration) {
        let is_apart = |before: &Rc<TimedScrape>| self.earlier.back().is_none_or(|last| before.at >= last.at + APART);
        self.earlier.extend(before.filter(is_apart));
        // Keep one scrape that is older than a minute, until the next scrape is also older. The
        // scrapes then cover at least a minute.
        while self.earlier.get(1).is_some_and(|second| second.at + MINUTE <= now) {
            self.earlier.pop_front();
        }
    }

    fn keep_trails(&mut self, view: &View) {
        self.trails.retain(|name, _| view.models.iter().any(|model| model.name == *name));
        for model in &view.models {
            let trail = self.trails.entry(model.name.clone()).or_default();
            let (generated, prompt) = (model.speed.generated_tokens, model.speed.prompt_tokens);
            for (kept, rate) in [(&mut trail.generated, generated), (&mut trail.prompt, prompt)] {
                kept.extend(rate);
                kept.drain(..kept.len().saturating_sub(TRAIL));
            }
        }
    }

    /// Handles a key. Returns `false` if the session ends.
    #[must_use]
    pub fn press(&mut self, key: Key) -> bool {
        match key {
            Key::Quit => return false,
            Key::Back if self.shows_help => self.shows_help = false,
            Key::Back => return self.top.take().is_some(),
            Key::Help => self.shows_help = !self.shows_help,
            Key::Pause => self.is_paused = !self.is_paused,
            Key::Slower => {
                let slower = INTERVALS.into_iter().find(|every| *every > self.every);
                self.every = slower.unwrap_or(self.every);
            }
            Key::Faster => {
                let faster = INTERVALS.into_iter().rev().find(|every| *every < self.every);
                self.every = faster.unwrap_or(self.every);
            }
            Key::PageDown => {
                self.top = Some(self.top.map_or(0, |top| top + self.viewport.page()).min(self.viewport.last_top()))
            }
            Key::PageUp => {
                let top = self.top.filter(|top| *top > 0);
                self.top = top.map(|top| top.saturating_sub(self.viewport.page()));
            }
            Key::Next | Key::Previous | Key::First | Key::Last if self.top.is_some() => self.scroll(key),
            Key::Next => self.choose(|place, last| if place == last { 0 } else { place + 1 }),
            Key::Previous => self.choose(|place, last| if place == 0 { last } else { place - 1 }),
            Key::First => self.choose(|_, _| 0),
            Key::Last => self.choose(|_, last| last),
        }
        true
    }

    fn scroll(&mut self, key: Key) {
        let last = self.viewport.last_top();
        self.top = self.top.map(|top| match key {
            Key::Next => (top + 1).min(last),
            Key::Previous => top.saturating_sub(1),
            Key::First => 0,
            _ => last,
        });
    }

    fn choose(&mut self, to: impl Fn(usize, usize) -> usize) {
        if let Some(view) = self.view.as_ref().filter(|view| !view.models.is_empty()) {
            let place = to(self.chosen_of(view).unwrap_or(0), view.models.len() - 1);
            self.chosen = Some(view.models[place].name.clone());
        }
    }

    fn chosen_of(&self, view: &View) -> Option<usize> {
        let chosen = view.models.iter().position(|model| Some(&model.name) == self.chosen.as_ref());
        chosen.or((!view.models.is_empty()).then_some(0))
    }

    /// Returns the view, once there was a scrape.
    pub fn view(&self) -> Option<&View> {
        self.view.as_ref()
    }

    /// Returns the index of the model whose panel is shown. This is the first model until the user
    /// chooses a model, and when the chosen model is gone.
    pub fn chosen(&self) -> Option<usize> {
        self.chosen_of(self.view.as_ref()?)
    }

    pub fn trail(&self, model: &str) -> Option<&Trail> {
        self.trails.get(model)
    }

    /// Returns the reason why there are no newer figures, if scrapes fail.
    pub fn lost(&self) -> Option<&Lost> {
        self.lost.as_ref()
    }

    /// Returns the age of the figures.
    pub fn age(&self, now: Duration) -> Option<Duration> {
        Some(now.saturating_sub(self.latest.as_ref()?.at))
    }

    /// Returns how long ago a restart, or another process, was noticed. `None` if that was more
    /// than `TOLD` ago.
    pub fn began_anew(&self, now: Duration) -> Option<Duration> {
        self.began_anew.map(|at| now.saturating_sub(at)).filter(|age| *age < TOLD)
    }
}

fn since(seen: &TimedScrape, now: Duration) -> Option<Since<'_>> {
    let seconds = now.saturating_sub(seen.at).as_secs_f64();
    (seconds > 0.0).then_some(Since { before: &seen.scrape.samples, seconds })
}

/// Returns `true` if counters or event numbers fell. `now` is then from another process or from a
/// restarted process.
fn is_another(now: &Scrape, before: &Scrape) -> bool {
    use super::scrape::Events::Listed;
    let numbers_fell = match (&now.events, &before.events) {
        (Listed(now), Listed(before)) => {
            let last = |events: &[super::event::Event]| events.last().map(|event| event.number);
            last(now) < last(before)
        }
        _ => false,
    };
    numbers_fell || now.samples.went_back(&before.samples)
}

#[cfg(test)]
mod tests {
    use super::{
        super::{exposition, scrape::Events},
        *,
    };

    fn scrape(text: &str) -> Scrape {
        let samples = exposition::read(text, "bursar_").expect("the text is well-formed");
        Scrape { samples, events: Events::Unavailable }
    }

    fn generated(tokens: u64, models: &[&str]) -> Scrape {
        let line = |model: &&str| {
            format!(
                "bursar_generated_tokens_total{{model=\"{model}\"}} {tokens}\nbursar_kv_blocks{{model=\"{model}\"}} 8\n"
            )
        };
        scrape(&models.iter().map(line).collect::<String>())
    }

    fn session() -> Session {
        Session::new("127.0.0.1:9464".to_owned(), Duration::from_secs(1))
    }

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn lost() -> ScrapeError {
        ScrapeError::NotOurs { address: "127.0.0.1:9464".to_owned() }
    }

    fn speed(session: &Session) -> Option<f64> {
        session.view().expect("the session has a view").models[0].speed.generated_tokens
    }

    #[test]
    fn rates_are_computed_between_the_last_two_scrapes() {
        let mut session = session();
        assert!(session.view().is_none());
        session.record(Ok(generated(100, &["a"])), seconds(1));
        assert_eq!(speed(&session), None, "a single scrape gives no rate");
        session.record(Ok(generated(300, &["a"])), seconds(3));
        session.record(Ok(generated(310, &["a"])), seconds(4));
        assert_eq!(speed(&session), Some(10.0));
        assert_eq!(session.trail("a").expect("the speed is known").generated, [100.0, 10.0]);
    }

    #[test]
    fn figures_of_an_unreachable_process_age_until_it_answers() {
        let mut session = session();
        session.record(Ok(generated(100, &["a"])), seconds(1));
        session.record(Err(lost()), seconds(3));
        session.record(Err(lost()), seconds(9));
        assert_eq!(session.lost().expect("the server is lost").since, seconds(3));
        assert_eq!(session.age(seconds(10)), Some(seconds(9)));
        assert!(session.view().is_some());
        session.record(Ok(generated(110, &["a"])), seconds(11));
        assert_eq!((session.lost(), session.age(seconds(11))), (None, Some(seconds(0))));
        assert_eq!(speed(&session), Some(1.0));
    }

    #[test]
    fn a_restarted_process_is_not_compared_with_its_predecessor() {
        let mut session = session();
        session.record(Ok(generated(100, &["a"])), seconds(1));
        session.record(Ok(generated(200, &["a"])), seconds(2));
        session.record(Ok(generated(7, &["a"])), seconds(3));
        assert_eq!(speed(&session), None);
        assert_eq!(session.began_anew(seconds(5)), Some(seconds(2)));
        assert_eq!(session.began_anew(seconds(50)), None);
        session.record(Ok(generated(9, &["a"])), seconds(4));
        assert_eq!(speed(&session), Some(2.0));
        assert_eq!(session.trail("a").expect("the speed is known").generated, [2.0]);
    }

    #[test]
    fn scrapes_of_one_minute_are_kept() {
        let mut session = session();
        for tenth in 0..2000 {
            session.record(Ok(generated(tenth, &["a"])), Duration::from_millis(100 * tenth));
        }
        let kept: Vec<_> = session.earlier.iter().map(|seen| seen.at).collect();
        assert!((60..=62).contains(&kept.len()), "{}", kept.len());
        assert!(
            kept[0] <= Duration::from_millis(199_900 - 60_000) && kept[1] > Duration::from_millis(199_900 - 60_000)
        );
        assert_eq!(session.trail("a").expect("the speed is known").generated.len(), TRAIL);
    }

    #[test]
    fn a_chosen_model_stays_chosen_while_others_come_and_go() {
        let mut session = session();
        assert!(session.press(Key::Next), "no model can be chosen yet");
        session.record(Ok(generated(1, &["b", "d"])), seconds(1));
        assert_eq!(session.chosen(), Some(0));
        assert!(session.press(Key::Next));
        assert_eq!(session.chosen(), Some(1));
        session.record(Ok(generated(2, &["a", "b", "c", "d"])), seconds(2));
        assert_eq!(session.chosen(), Some(3));
        assert!(session.press(Key::Next));
        assert_eq!(session.chosen(), Some(0), "the first model follows the last");
        assert!(session.press(Key::Previous) && session.press(Key::Previous));
        assert_eq!(session.chosen(), Some(2));
        session.record(Ok(generated(3, &["a", "b"])), seconds(3));
        assert_eq!(session.chosen(), Some(0), "a model that is gone is no longer chosen");
        assert!(session.press(Key::Last));
        assert_eq!(session.chosen(), Some(1));
        session.record(Ok(scrape("bursar_device_total_bytes 1\n")), seconds(4));
        assert_eq!(session.chosen(), None);
    }

    #[test]
    fn keys_control_interval_pause_help_paging_and_quitting() {
        let mut session = session();
        assert!(session.press(Key::Slower) && session.every == seconds(2));
        for _ in 0..20 {
            assert!(session.press(Key::Faster));
        }
        assert_eq!(session.every, Duration::from_millis(100));
        for _ in 0..20 {
            assert!(session.press(Key::Slower));
        }
        assert_eq!(session.every, seconds(30));
        assert!(session.press(Key::Pause) && session.is_paused);
        assert!(session.press(Key::Pause) && !session.is_paused);
        assert!(session.press(Key::Help) && session.shows_help);
        assert!(session.press(Key::Back) && !session.shows_help, "the first Back key closes the help");
        session.viewport = Viewport { rows: 10, lines: 25 };
        let mut tops = [Key::PageDown; 5].map(|key| session.press(key).then_some(session.top).expect("not ended"));
        assert_eq!(tops, [Some(0), Some(9), Some(15), Some(15), Some(15)], "paging ends at the last line");
        tops = [Key::Previous, Key::Next, Key::First, Key::Last, Key::PageUp]
            .map(|key| session.press(key).then_some(session.top).expect("the session goes on"));
        assert_eq!(tops, [Some(14), Some(15), Some(0), Some(15), Some(6)]);
        assert!(session.press(Key::PageUp) && session.top == Some(0));
        assert!(session.press(Key::PageUp) && session.top.is_none(), "the overview comes before the first page");
        assert!(session.press(Key::PageDown) && session.press(Key::Back) && session.top.is_none());
        assert!(!session.press(Key::Back));
        assert!(!session.press(Key::Quit));
    }
}

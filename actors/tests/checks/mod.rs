//! Checks of the simulated world: the memory that a step may read and write, how often sequences
//! lose their blocks, and the state after the last request.

use super::*;

impl World {
    /// Checks that a step stays within the permits (rule 4: concurrency never exceeds what was
    /// stressed), and that the step accesses only the memory of its own sequences.
    pub(super) fn check_plan(&mut self, plan: Box<StepPlan>) {
        self.copies_before_a_step();
        let ahead = self.under_way.len();
        assert!(ahead <= usize::from(self.looks_ahead), "{ahead} steps are already running");
        let batch = &plan.batch;
        assert!(batch.token_count() <= self.limits.step_tokens, "a step has {} tokens", batch.token_count());
        assert!(batch.sequence_count() <= self.limits.sequences, "a step has {} sequences", batch.sequence_count());
        assert!(batch.token_count() > 0);
        let distinct: BTreeSet<_> = batch.slots.iter().collect();
        assert_eq!(distinct.len(), batch.slots.len(), "each token is written to a separate slot");
        // Each sequence reads only content that it would have computed itself. No sequence of the
        // step reads slots that the step writes.
        for (part, id) in plan.parts.iter().enumerate() {
            let request = self.of_sequence(*id).expect("a request asked for the sequence");
            assert!(request.has_begun, "{id} was reported as begun");
            let number = request.number;
            let sequence = self.scheduler.sequence(*id).expect("a planned sequence runs");
            let rows_of = plan.rows.iter().find(|rows| rows.sequence == *id);
            let unseen: Vec<u32> = match rows_of {
                Some(rows) if !rows.drafts.is_empty() => rows.drafts.clone(),
                _ => (0..2).map(|next| chosen(number, sequence.produced + next)).collect(),
            };
            let content = content(sequence, &unseen);
            let rows = batch.query_starts[part] as usize..batch.query_starts[part + 1] as usize;
            let last = match batch.tokens[rows.end - 1] {
                InputToken::Unseen(unseen) => self.previous[unseen.row as usize],
                InputToken::Known(id) => id,
            };
            if let Some(row) = rows_of {
                let known = sequence.produced + usize::from(row.unseen.is_some());
                assert_eq!(known, row.position, "at most one token of {id} is unseen");
                let before = row.unseen.map(|unseen| self.previous[unseen.row as usize]);
                assert!(before.is_none_or(|before| before == unseen[0]), "{id} continues with the chosen token");
                assert!(before.is_none() || !sequence.must_be_seen(), "the host must see the token of {id}");
            }
            let mut tokens = sequence.tokens.iter().chain(&unseen);
            assert_eq!(tokens.nth(batch.context_lengths[part] as usize - 1), Some(&last), "the last token of {id}");
            let length = batch.context_lengths[part] as usize;
            if whole_picture_tokens(self.seed) > 0 {
                let pictures = sequence.pictures.iter().map(|picture| &picture.content.tokens);
                let cut = pictures.into_iter().find(|tokens| tokens.start < length && length < tokens.end);
                assert_eq!(cut, None, "a step ends within a picture of {id}");
            }
            let new = (batch.query_starts[part + 1] - batch.query_starts[part]) as usize;
            for (group, CacheGroup { window, .. }) in self.groups.as_slice().iter().enumerate() {
                let table = &batch.block_tables[(group * plan.parts.len() + part) * batch.blocks_max()..];
                let first = window.map_or(0, |window| (length - new + 1).saturating_sub(window));
                for (token, content) in content.iter().enumerate().take(length).skip(first) {
                    let slot = table[token / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + (token % BLOCK_TOKENS) as u32;
                    let is_written = token >= length - new;
                    assert_eq!(distinct.contains(&slot), is_written, "{id} reads token {token} where another writes");
                    // Each group has keys and values of other layers.
                    let content = content.wrapping_add(group as u64);
                    if is_written {
                        self.slots[slot as usize] = Some(content)
                    } else {
                        assert_eq!(self.slots[slot as usize], Some(content), "token {token} of {id} in group {group}")
                    }
                }
            }
        }
        let mut scored_tokens = 0;
        let distinct: BTreeSet<_> = plan.rows.iter().map(|row| row.sequence).collect();
        assert_eq!(
            (distinct.len(), plan.rows.iter().map(ChosenRows::count).sum()),
            (plan.rows.len(), batch.logit_rows.len()),
            "each sequence chooses one token, and one after each draft"
        );
        for scored in &plan.scored {
            let request = self.of_sequence(scored.sequence).expect("a request asked for the sequence");
            let tokens = &request.tokens()[..request.prompt_tokens()];
            assert_eq!((scored.first, Some(scored.top)), (request.scored + 1, request.scores()), "no score is skipped");
            assert_eq!(scored.tokens, tokens[scored.first..scored.first + scored.tokens.len()]);
            request.scored += scored.tokens.len();
            scored_tokens += scored.tokens.len();
        }
        self.scored += scored_tokens;
        let holds = |row: &u32| {
            let held = plan.shown.read.iter().filter_map(|id| self.pins.get(id));
            let key = self.rows[*row as usize];
            held.into_iter().any(|(keys, rows)| rows.contains(row) && key.is_some_and(|key| keys.contains(&key)))
        };
        assert!(batch.picture_cache_rows.iter().all(holds), "a row is read that is not held or was never written");
        for id in &plan.shown.read {
            let sequence = self.scheduler.sequence(*id).expect("a planned sequence runs");
            for picture in &sequence.pictures {
                let shows = |row: &u32| self.rows[*row as usize] == Some(picture.content.hash);
                assert!(picture.cache_rows.iter().all(shows), "{id} reads rows that hold another picture");
            }
        }
        let past =
            plan.shown.no_longer_read.iter().map(|id| self.pins.remove(id).expect("the sequence held its pictures"));
        self.pins_of_steps.push_back(past.collect());
        let (tokens, rows) = (batch.token_count(), plan.rows.len());
        self.note(format_args!("step of {tokens} tokens, {rows} chosen"));
        self.steps += 1;
        self.planned_ahead += ahead;
        self.previous = self.choices(&plan);
        self.under_way.push_back(plan);
    }

    /// A sequence may lose its blocks to other sequences twice, and once more for each shrink of
    /// the pool.
    pub(super) fn loses_blocks(&mut self, id: SequenceId) {
        let losses = self.losses.entry(id).or_default();
        *losses += 1;
        assert!(*losses <= 2 + self.shrinks, "{id} lost its blocks {losses} times, after {} shrinks", self.shrinks);
    }

    pub(super) fn check_end(&self) {
        assert_eq!(self.scheduler.counts(), (0, 0), "no sequence waits or runs");
        assert_eq!(self.scheduler.kv().free_blocks(), self.scheduler.kv().blocks(), "all blocks are free");
        assert!(self.all_pins().next().is_none() && self.pixels.is_empty(), "all pins and pixels are released");
        for request in self.requests.values() {
            assert!(request.is_over(), "request {} has not ended", request.number);
            let (tokens, finish) = request.expected();
            assert!(tokens.starts_with(&request.produced), "request {}", request.number);
            if !request.cancelled && !request.is_late {
                assert_eq!(request.produced, tokens, "request {}", request.number);
                assert_eq!(request.end, Some(finish), "request {}", request.number);
            }
        }
    }
}

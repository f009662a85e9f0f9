//! The pictures of a request. A picture whose tokens are in the prefix cache needs only its hash.
//! Every other picture needs rows of the vision cache.

use std::{ops::Range, sync::Arc};

use bursar_model::{
    flow::{ContentSpan, PictureHash, PlaceholderSpan, PrefixKeys, PromptLayout},
    processor::{MediaKey, MediaPlan},
};
use ractor::ActorRef;

use crate::{
    chat::ChatError,
    engine::Serving,
    order::Priority,
    responder::AskError,
    scheduler::{Placeholder, SchedulerMessage},
    tree,
    vision::{PinnedSet, VisionError, VisionMessage},
};

/// The pictures of a request, as one admission passes them to the scheduler.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestPictures {
    /// Hashes of the first pictures, whose tokens are in the prefix cache.
    computed: Arc<[PictureHash]>,
    /// Pinned rows of the other pictures. `None` if the tokens of all pictures are in the prefix
    /// cache.
    pins: Option<Arc<PinnedSet>>,
}

impl RequestPictures {
    /// Finds out which pictures of a request have their tokens in the prefix cache, and gets rows
    /// of the vision cache for all other pictures. If `may_be_computed` is `false`, the prefix
    /// cache is not used and all pictures get rows. `priority` orders this request among all
    /// requests that wait for rows. Returns `None` if an actor died.
    ///
    /// # Errors
    /// [`ChatError::Media`] for a picture that cannot be read. [`ChatError::Vision`] if the
    /// pictures do not get into the vision cache. [`ChatError::Unanswered`] if an actor does not
    /// answer in time.
    pub(crate) async fn get(
        serving: &Serving,
        files: &[MediaPlan],
        prompt: &PromptLayout,
        prefix: &mut PrefixKeys,
        may_be_computed: bool,
        priority: Priority,
    ) -> Result<Option<Self>, ChatError> {
        let Some(vision) = serving.vision.as_ref().filter(|_| !files.is_empty()) else {
            return Ok(Some(RequestPictures::default()));
        };
        let computed =
            if may_be_computed { Self::computed(serving, vision, files, prompt, prefix).await? } else { Vec::new() };
        let (before, others) = files.split_at(computed.len());
        let computed = computed.concat().into();
        if others.is_empty() {
            return Ok(Some(RequestPictures { computed, pins: None }));
        }
        let embed = |reply| VisionMessage::Embed { pictures: others.to_vec(), priority, reply };
        match tree::EMBED_PICTURES.ask(vision, embed).await {
            Ok(Ok(pins)) => Ok(Some(RequestPictures { computed, pins: Some(Arc::new(pins)) })),
            Ok(Err(VisionError::Media(error))) => Err(error.after(before).into()),
            Ok(Err(error)) => Err(error.into()),
            Err(AskError::Gone { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Finds the leading files that need no rows: the hashes of their pictures are known, and the
    /// tokens of these pictures are in the prefix cache. Returns the picture hashes of each such
    /// file. Empty if an actor has died.
    async fn computed(
        serving: &Serving,
        vision: &ActorRef<VisionMessage>,
        files: &[MediaPlan],
        prompt: &PromptLayout,
        prefix: &mut PrefixKeys,
    ) -> Result<Vec<Vec<PictureHash>>, ChatError> {
        let files: Vec<MediaKey> = files.iter().map(MediaPlan::key).collect();
        let named = tree::HASH_PICTURES.ask(vision, |reply| VisionMessage::Name { files, reply }).await;
        let mut named = or_none(named)?;
        if named.is_empty() {
            return Ok(named);
        }
        name_blocks(prefix, prompt, &named.concat());
        let prefix = prefix.clone();
        let looked_up = |reply| SchedulerMessage::LookUp { prefix, reply };
        let tokens = or_none(tree::LOOK_UP_PREFIX.ask(&serving.scheduler, looked_up).await)?;
        named.truncate(files_within(tokens, &named, &prompt.pictures));
        Ok(named)
    }

    /// Placeholders of all pictures in a prompt.
    pub(crate) fn places(&self, spans: &[PlaceholderSpan]) -> Vec<Placeholder> {
        let place = |span: &PlaceholderSpan| {
            let (hash, cache_rows) = match self.computed.get(span.picture) {
                Some(hash) => (*hash, [].into()),
                None => {
                    let pins = self.pins.as_ref().expect("a picture is either computed already or has rows");
                    let pinned = &pins.pictures[span.picture - self.computed.len()];
                    (pinned.key, pinned.rows.clone())
                }
            };
            Placeholder { content: ContentSpan { tokens: span.tokens.clone(), hash }, cache_rows }
        };
        spans.iter().map(place).collect()
    }

    /// Number of pictures that need no rows, because their tokens are in the prefix cache.
    pub(crate) fn computed_count(&self) -> usize {
        self.computed.len()
    }

    /// Returns the pins that keep the rows of all other pictures in the vision cache.
    pub(crate) fn pins(&self) -> Option<Arc<PinnedSet>> {
        self.pins.clone()
    }
}

/// Returns the answer of an actor, or the default value if the actor has died.
fn or_none<T: Default>(answer: Result<T, AskError>) -> Result<T, ChatError> {
    match answer {
        Err(AskError::Gone { .. }) => Ok(T::default()),
        answer => Ok(answer?),
    }
}

/// Computes the keys of a prompt's blocks, up to the first picture without a hash.
fn name_blocks(prefix: &mut PrefixKeys, prompt: &PromptLayout, names: &[PictureHash]) {
    let (named, others): (Vec<_>, Vec<_>) = prompt.pictures.iter().partition(|span| span.picture < names.len());
    let end = others.iter().map(|span| span.tokens.start).min().unwrap_or(prompt.tokens.len());
    let content = |span: &PlaceholderSpan| ContentSpan { tokens: span.tokens.clone(), hash: names[span.picture] };
    let contents: Vec<_> = named.into_iter().map(content).collect();
    prefix.extend(&prompt.tokens[..end], &prompt.positions[..end], &contents);
}

/// Number of leading files whose pictures all end within the first `tokens` tokens.
fn files_within(tokens: usize, files: &[Vec<PictureHash>], spans: &[PlaceholderSpan]) -> usize {
    let mut pictures: Range<usize> = 0..0;
    let is_within = |file: &&Vec<PictureHash>| {
        pictures = pictures.end..pictures.end + file.len();
        spans.iter().filter(|span| pictures.contains(&span.picture)).all(|span| span.tokens.end <= tokens)
    };
    files.iter().take_while(is_within).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(tokens: &[Range<usize>]) -> Vec<PlaceholderSpan> {
        tokens.iter().enumerate().map(|(picture, tokens)| PlaceholderSpan { picture, tokens: tokens.clone() }).collect()
    }

    #[test]
    fn a_file_is_computed_after_its_last_pictures_last_token() {
        let name = PictureHash([1; 32]);
        let files = [vec![name], vec![name; 2], vec![name]];
        let spans = spans(&[2..6, 9..13, 14..18, 40..44]);
        for (tokens, whole) in [(0, 0), (5, 0), (6, 1), (16, 1), (18, 2), (43, 2), (44, 3)] {
            assert_eq!(files_within(tokens, &files, &spans), whole, "{tokens} tokens");
        }
        assert_eq!(files_within(99, &files[..1], &spans), 1, "the other files are unknown");
    }

    #[test]
    fn blocks_are_named_up_to_the_first_unnamed_picture() {
        let tokens: Vec<u32> = (0..70).collect();
        let prompt = PromptLayout {
            positions: (0..70).map(|position| [position; 3]).collect(),
            next_position: 70,
            pictures: spans(&[2..6, 50..54]),
            tokens,
        };
        let named = |names: &[u8]| {
            let mut prefix = PrefixKeys::default();
            let names: Vec<_> = names.iter().map(|name| PictureHash([*name; 32])).collect();
            name_blocks(&mut prefix, &prompt, &names);
            prefix.as_slice().to_vec()
        };
        assert_eq!(named(&[]), [], "the first picture begins in the first block");
        assert_eq!(named(&[1]).len(), 3, "50 tokens are three whole blocks and two tokens");
        assert_eq!((named(&[1, 2]).len(), &named(&[1, 2])[..3]), (4, &named(&[1])[..]));
        assert_ne!(named(&[3]), named(&[1]));
    }
}

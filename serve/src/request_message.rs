//! Messages of a conversation as sent in a request. Pictures and videos are still links.

use std::collections::HashMap;

use bursar::{Chat, ChatError, Content, MediaError, ModelHandle, Role};

use super::{
    body::BodyPermit,
    error::ApiError,
    media::{self, Link, LoadedMedia},
    state::Shared,
};

pub(super) struct RequestMessage {
    pub(super) role: Role,
    pub(super) pieces: Vec<Piece>,
    /// Ids of the tool calls in this message.
    pub(super) calls: Vec<Option<String>>,
    /// Id of the call that this tool result answers.
    pub(super) result_of: Option<String>,
}

pub(super) enum Piece {
    Content(Content),
    Shown(Link),
}

impl Piece {
    pub(super) fn text(text: impl Into<String>) -> Self {
        Piece::Content(Content::Text(text.into()))
    }
}

impl RequestMessage {
    pub(super) fn new(role: Role, pieces: Vec<Piece>) -> Self {
        RequestMessage { role, pieces, calls: Vec::new(), result_of: None }
    }

    /// Creates the result of the tool call with the id `of`.
    pub(super) fn result(of: String, pieces: Vec<Piece>) -> Self {
        RequestMessage { result_of: Some(of), ..RequestMessage::new(Role::Tool, pieces) }
    }

    /// Adds a message. If the last message has the same role, the two are joined. Tool results are
    /// not joined: there is one message per call.
    pub(super) fn join(messages: &mut Vec<RequestMessage>, message: RequestMessage) {
        match messages.last_mut() {
            Some(last) if last.role == message.role && message.role != Role::Tool => {
                let between = if message.role == Role::System { "\n\n" } else { "\n" };
                let mut pieces = message.pieces.into_iter().peekable();
                // Join adjacent texts, so that no template inserts anything between them.
                if let Some(Piece::Content(Content::Text(text))) = last.pieces.last_mut()
                    && let Some(Piece::Content(Content::Text(more))) =
                        pieces.next_if(|piece| matches!(piece, Piece::Content(Content::Text(_))))
                {
                    text.extend([between, &more]);
                }
                last.pieces.extend(pieces);
                last.calls.extend(message.calls);
            }
            _ => messages.push(message),
        }
    }
}

/// Request fields of the pictures and videos, in the order of the conversation.
#[derive(Clone, Debug, Default)]
pub(super) struct MediaFields {
    pictures: Vec<String>,
    videos: Vec<String>,
}

impl MediaFields {
    /// Converts an error. If the error is about a picture or video, it names the request field.
    pub(super) fn error(&self, error: ChatError) -> ApiError {
        let place = match &error {
            ChatError::Media(MediaError::Picture { index, .. } | MediaError::PictureTooLarge { index, .. }) => {
                self.pictures.get(*index)
            }
            ChatError::Media(MediaError::Video { index, .. }) => self.videos.get(*index),
            ChatError::Media(MediaError::TooManyPictures { limit, .. }) => self.pictures.get(*limit),
            _ => None,
        };
        let message = ApiError::from(error);
        match place {
            Some(place) => message.of_field(place),
            None => message,
        }
    }
}

/// Builds the chat, after reading all pictures and videos.
pub(super) async fn chat(
    mut messages: Vec<RequestMessage>,
    model: &ModelHandle,
    shared: &Shared,
    permit: &mut BodyPermit,
) -> Result<(Chat, MediaFields), ApiError> {
    order_results(&mut messages);
    let mut links = Vec::new();
    let mut parts = Vec::new();
    for message in messages {
        let id = message.result_of.filter(|_| message.role == Role::Tool).map(|id| Some(Content::ResultOf(id)));
        let pieces = message.pieces.into_iter().map(|piece| match piece {
            Piece::Content(content) => Some(content),
            Piece::Shown(link) => {
                links.push(link);
                None
            }
        });
        parts.push((message.role, id.into_iter().chain(pieces).collect::<Vec<_>>()));
    }
    let place = |is_video: bool| {
        let links = links.iter().filter(move |link: &&Link| link.is_video() == is_video);
        links.map(|link| link.param().to_owned()).collect()
    };
    let places = MediaFields { pictures: place(false), videos: place(true) };
    let facts = if links.iter().any(Link::wants_facts) { Some(model.facts().await?) } else { None };
    let mut seen = media::read(links, facts.as_ref(), shared, permit).await?.into_iter().map(|seen| match seen {
        LoadedMedia::Picture(picture) => Content::Image(picture),
        LoadedMedia::Video(video) => Content::Video(video),
    });
    let variables = shared.options.template_variables.clone();
    let blank = variables.into_iter().fold(Chat::new(), |chat, (name, value)| chat.template_variable(name, value));
    let chat = parts.into_iter().fold(blank, |chat, (role, pieces)| {
        // `seen` has one item per link.
        chat.turn(role, pieces.into_iter().filter_map(|piece| piece.or_else(|| seen.next())).collect())
    });
    Ok((chat, places))
}

/// Sorts tool results into the order of their calls. Most chat templates show no ids, so the model
/// can match results to calls only by their order.
fn order_results(messages: &mut [RequestMessage]) {
    let mut rest = messages;
    while let Some(called) = rest.iter().position(|turn| !turn.calls.is_empty()) {
        let (before, results) = rest.split_at_mut(called + 1);
        let ids = before[called].calls.iter().enumerate().filter_map(|(at, id)| Some((id.as_deref()?, at)));
        let order: HashMap<&str, usize> = ids.collect();
        let count = results.iter().take_while(|turn| turn.role == Role::Tool).count();
        // The sort is stable: results of unknown calls keep their order and come last.
        results[..count].sort_by_cached_key(|result| {
            result.result_of.as_deref().and_then(|of| order.get(of)).copied().unwrap_or(usize::MAX)
        });
        rest = &mut results[count..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tool_results_are_ordered_like_their_calls() {
        let called = |ids: &[&str]| {
            let calls = ids.iter().map(|&id| Some(id.to_owned())).collect();
            RequestMessage { calls, ..RequestMessage::new(Role::Assistant, Vec::new()) }
        };
        let result = |id: &str| RequestMessage::result(id.to_owned(), Vec::new());
        let asked = || RequestMessage::new(Role::User, Vec::new());
        let mut messages = vec![
            asked(),
            called(&["a", "b"]),
            result("c"),
            result("b"),
            result("a"),
            asked(),
            called(&["d"]),
            result("d"),
            result("a"),
        ];
        order_results(&mut messages);
        let results: Vec<_> = messages.iter().filter_map(|message| message.result_of.as_deref()).collect();
        assert_eq!(results, ["a", "b", "c", "d", "a"]);
    }

    #[test]
    fn a_hundred_thousand_calls_and_results_are_matched_quickly() {
        let ids = || (0..100_000).map(|id: u32| id.to_string());
        let calls = ids().map(Some).collect();
        let mut messages = vec![RequestMessage { calls, ..RequestMessage::new(Role::Assistant, Vec::new()) }];
        messages.extend(ids().rev().map(|id| RequestMessage::result(id, Vec::new())));
        let begun = std::time::Instant::now();
        order_results(&mut messages);
        // Comparing each call with each result would take minutes.
        assert!(begun.elapsed() < std::time::Duration::from_secs(10), "{:?}", begun.elapsed());
        assert!(messages[1..].iter().filter_map(|message| message.result_of.clone()).eq(ids()));
    }
}

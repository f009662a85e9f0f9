//! Turns of a conversation as they stand in a request, with links in place of pictures.

use super::{
    error::ApiError,
    media::{self, Link, Seen},
    openai::turns::{self, Read},
    service::Shared,
};
use crate::{Chat, Content, Role};

/// One turn.
pub(super) struct Draft {
    pub(super) role: Role,
    pub(super) pieces: Vec<Piece>,
    /// The ids of a model's calls.
    pub(super) calls: Vec<Option<String>>,
    /// The call that a result is of.
    pub(super) result_of: Option<String>,
}

/// A piece of a turn.
pub(super) enum Piece {
    Said(Content),
    Shown(Link),
}

impl Piece {
    pub(super) fn text(text: impl Into<String>) -> Self {
        Piece::Said(Content::Text(text.into()))
    }
}

impl Draft {
    pub(super) fn new(role: Role, pieces: Vec<Piece>) -> Self {
        Draft { role, pieces, calls: Vec::new(), result_of: None }
    }

    /// What a tool answered to the call of this id.
    pub(super) fn result(of: String, pieces: Vec<Piece>) -> Self {
        Draft { result_of: Some(of), ..Draft::new(Role::Tool, pieces) }
    }

    /// Adds a turn, or goes on with the last one if the same role speaks again. Results stay apart, one a call.
    pub(super) fn join(drafts: &mut Vec<Draft>, draft: Draft) {
        match drafts.last_mut() {
            Some(last) if last.role == draft.role && draft.role != Role::Tool => {
                if draft.role == Role::System {
                    last.pieces.push(Piece::text("\n\n"));
                }
                last.pieces.extend(draft.pieces);
                last.calls.extend(draft.calls);
            }
            _ => drafts.push(draft),
        }
    }
}

/// The conversation, once all that it shows has been read.
pub(super) async fn chat(drafts: Vec<Draft>, shared: &Shared) -> Result<Chat, ApiError> {
    let mut links = Vec::new();
    let mut said = Vec::new();
    for draft in drafts {
        let pieces = draft.pieces.into_iter().map(|piece| match piece {
            Piece::Said(content) => Some(content),
            Piece::Shown(link) => {
                links.push(link);
                None
            }
        });
        let pieces: Vec<_> = pieces.collect();
        said.push((draft.role, pieces, draft.calls, draft.result_of));
    }
    let mut seen = media::read(links, shared).await?.into_iter().map(|seen| match seen {
        Seen::Picture(picture) => Content::Image(picture),
        Seen::Film(film) => Content::Video(film),
    });
    let turns = said.into_iter().map(|(role, pieces, calls, result_of)| {
        // As many were seen as there are links.
        let contents = pieces.into_iter().filter_map(|piece| piece.or_else(|| seen.next())).collect();
        Read { role, contents, calls, result_of }
    });
    Ok(turns::joined(turns.collect()))
}

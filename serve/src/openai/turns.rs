//! Conversion of OpenAI's messages into [`RequestMessage`]s.

use bursar::{Content, Role};

use super::chat_request::{ChatMessage, ContentPart, PictureSource};
use crate::{
    error::ApiError,
    media::{Link, Sizes},
    models::shortened,
    request_message::{Piece, RequestMessage},
    tool,
};

/// Converts messages. Pictures are not read yet: each stays a link with these sizes.
pub(super) fn request_messages(messages: Vec<ChatMessage>, sizes: Sizes) -> Result<Vec<RequestMessage>, ApiError> {
    messages.into_iter().enumerate().map(|(index, message)| turn(message, index, sizes)).collect()
}

fn turn(message: ChatMessage, index: usize, sizes: Sizes) -> Result<RequestMessage, ApiError> {
    let role = match message.role.as_str() {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" | "function" => Role::Tool,
        other => {
            let message = format!("unknown role `{}`", shortened(other));
            let error = ApiError::invalid(format!("messages[{index}].role"), message);
            return Err(error.hint("expected system, developer, user, assistant or tool"));
        }
    };
    let mut pieces = Vec::new();
    let reasoning = message.reasoning_content.or(message.reasoning).filter(|reasoning| !reasoning.is_empty());
    pieces.extend(reasoning.map(|reasoning| Piece::Content(Content::Reasoning(reasoning))));
    for (at, part) in message.content.map(|content| content.0).unwrap_or_default().into_iter().enumerate() {
        pieces.push(piece(part, &format!("messages[{index}].content[{at}]"), sizes)?);
    }
    let calls = message.tool_calls.unwrap_or_default();
    if !calls.is_empty() && role != Role::Assistant {
        let error = ApiError::invalid(format!("messages[{index}].tool_calls"), "only the assistant can call tools");
        return Err(error);
    }
    let ids = calls.iter().map(|call| call.id.clone()).collect();
    pieces.extend(
        calls.into_iter().map(|call| Piece::Content(tool::call(call.id, &call.function.name, call.function.arguments))),
    );
    Ok(RequestMessage { calls: ids, result_of: message.tool_call_id, ..RequestMessage::new(role, pieces) })
}

fn piece(part: ContentPart, param: &str, sizes: Sizes) -> Result<Piece, ApiError> {
    let lacks = |field: &str| {
        ApiError::invalid(
            format!("{param}.{field}"),
            format!("`{field}` is missing; a part of type `{}` requires it", part.kind),
        )
    };
    match part.kind.as_str() {
        "text" | "input_text" | "output_text" => part.text.map(Piece::text).ok_or_else(|| lacks("text")),
        "refusal" => part.refusal.map(Piece::text).ok_or_else(|| lacks("refusal")),
        "thinking" => {
            let thought = part.thinking.ok_or_else(|| lacks("thinking"))?;
            Ok(Piece::Content(Content::Reasoning(thought)))
        }
        "image_url" | "input_image" => {
            let image = part.image_url.ok_or_else(|| lacks("image_url"))?.0;
            let link = Link::picture(format!("{param}.image_url.url"), &image.url)?;
            Ok(Piece::Shown(link.sized(sizes, image.detail.or(part.detail).as_deref())))
        }
        "image" => {
            let link = match (part.image.or(part.url), part.image_url, part.source) {
                (Some(url), ..) => Link::picture(format!("{param}.image"), &url)?,
                (None, Some(image), _) => Link::picture(format!("{param}.image_url.url"), &image.0.url)?,
                (None, None, Some(PictureSource { data: Some(data), .. })) => {
                    Link::base64(format!("{param}.source.data"), &data)?
                }
                (None, None, Some(PictureSource { url: Some(url), .. })) => {
                    Link::picture(format!("{param}.source.url"), &url)?
                }
                _ => return Err(lacks("image")),
            };
            Ok(Piece::Shown(link.sized(sizes, part.detail.as_deref())))
        }
        "video_url" => {
            let url = part.video_url.ok_or_else(|| lacks("video_url"))?.0.url;
            Link::video(format!("{param}.video_url.url"), &url, part.fps.or(sizes.fps)).map(Piece::Shown)
        }
        "video" => {
            let frames = part.video.ok_or_else(|| lacks("video"))?.0;
            Link::frames(format!("{param}.video"), &frames, part.fps.or(sizes.fps)).map(Piece::Shown)
        }
        "input_audio" | "audio_url" => {
            let error = ApiError::invalid(format!("{param}.type"), "audio is not supported");
            Err(error.hint("send text, pictures or videos"))
        }
        other => {
            let message = format!("parts of type `{}` are not supported", shortened(other));
            let hint = "expected text, image_url, image, video_url or video";
            Err(ApiError::invalid(format!("{param}.type"), message).hint(hint))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{error::Shape, one_or_many::OneOrMany};

    fn message(role: &str, text: &str) -> ChatMessage {
        let content = Some(OneOrMany(vec![ContentPart::from(text.to_owned())]));
        ChatMessage { role: role.to_owned(), content, ..ChatMessage::default() }
    }

    #[test]
    fn an_unknown_role_or_content_part_is_named() {
        let error = |message| {
            request_messages(vec![message], Sizes::default())
                .map(drop)
                .expect_err("the role or part is unknown")
                .body(Shape::OpenAi)
        };
        assert_eq!(error(message("boss", "a"))["error"]["param"], "messages[0].role");
        let audio = ContentPart { kind: "input_audio".to_owned(), ..ContentPart::default() };
        let message = ChatMessage { content: Some(OneOrMany(vec![audio])), ..message("user", "a") };
        assert_eq!(error(message)["error"]["param"], "messages[0].content[0].type");
    }
}

//! Replies that continue the last assistant turn (`continue_final_message`).

use bursar::{Chat, ChatError, ContinueError, Hint, OutputFormat, Role, TextError};

use crate::stage::{Stage, about, ask, small, story, text};

#[test]
fn a_continued_reply_equals_the_rest_of_the_whole_reply() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let whole = ask(&stage.model, about(1).log_probabilities(0)).await.expect("the model answers");
        for count in [1, whole.tokens.len() / 2, whole.tokens.len() - 1] {
            let text: String = whole.tokens[..count].iter().map(|score| score.token.text.as_str()).collect();
            let rest = ask(&stage.model, about(1).assistant(&text).continue_final_message()).await.expect("a reply");
            assert_eq!(text.clone() + &rest.text, whole.text, "continued after {text:?}");
        }
        // A closed turn is different: the model begins a new turn after it.
        let prompt = async |chat: Chat| stage.model.prompt_of(chat).await.expect("a prompt").token_ids;
        let half = || about(1).assistant(&whole.text);
        let (continued, closed) =
            (prompt(half().continue_final_message()).await, prompt(half().add_generation_prompt(false)).await);
        let begun = prompt(half()).await;
        assert!(closed.starts_with(&continued) && begun.starts_with(&closed), "each prompt extends the one before");
        assert!(continued.len() < closed.len() && closed.len() < begun.len());
        stage.settled(&before).await;
    });
}

#[test]
fn a_format_constrains_only_the_continuation() {
    story(async {
        let stage = Stage::set(small()).await;
        let colour = OutputFormat::Choice(vec!["blue".to_owned()]);
        let chat = text("Which colour?").assistant("The answer is ").continue_final_message().format(colour);
        assert_eq!(ask(&stage.model, chat).await.expect("the model answers").text, "blue");
    });
}

#[test]
fn only_a_rendered_assistant_turn_can_be_continued() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let refused = async |chat: Chat| stage.model.chat(chat.continue_final_message()).await.expect_err("refused");
        let why = |error: &ChatError| match error {
            ChatError::Text(error) => match &**error {
                TextError::Continue(why) => why.clone(),
                other => panic!("{other}"),
            },
            other => panic!("{other}"),
        };
        let error = refused(text("Hm?")).await;
        assert_eq!(why(&error), ContinueError::NotTheModels { role: "user".into() });
        assert!(error.hint().contains("a turn of the model"), "{}", error.hint());
        let call = serde_json::json!({"type": "function", "function": {"name": "clock", "arguments": {}}});
        assert_eq!(why(&refused(text("Hm?").assistant("I look.").tool_call(call)).await), ContinueError::Nothing);
        assert_eq!(
            why(&refused(text("Hm?").turn(Role::Assistant, Vec::new()).reasoning("So")).await),
            ContinueError::NotShown
        );
        let both = refused(text("Hm?").assistant("So").add_generation_prompt(true)).await;
        assert_eq!(why(&both), ContinueError::BeginsAnother);
        assert!(matches!(refused(Chat::from_tokens([3])).await, ChatError::TokensAndTurns));
        stage.settled(&before).await;
    });
}

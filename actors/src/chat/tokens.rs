//! Tokens without a reply: text to tokens and back, and what a chat would be as a prompt.

use std::{fmt, sync::Arc};

use super::{
    Chat, ChatError, ModelHandle,
    preparation::{check_known, counted, counted_max, prompt_of, tokens_limit},
};
use crate::engine::ModelContext;

/// Threads of one model that make tokens without a reply. More callers wait for one.
pub(super) const TOKEN_THREADS: usize = 4;

/// What a chat would be as a prompt.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Prompt {
    /// Its tokens, with a placeholder for each row of a picture or video.
    pub token_ids: Vec<u32>,
    /// How many of them stand for each picture or video, in the order of the chat.
    pub picture_tokens: Vec<usize>,
}

/// Shows counts, never the tokens, which are the user's text.
impl fmt::Debug for Prompt {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = formatter.debug_struct("Prompt");
        shown.field("token_ids", &self.token_ids.len()).field("picture_tokens", &self.picture_tokens).finish()
    }
}

/// Nothing here takes a request's credit or waits for the device. Four threads work for each model, and more callers
/// wait for one of them, in order.
///
/// ```
/// # use bursar_actors::{chat::{Chat, Image}, engine::LoadOptions};
/// # use bursar_actors::runtime::{ModelSource, Runtime, RuntimeConfig};
/// # #[tokio::main(flavor = "multi_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let runtime = Runtime::start(RuntimeConfig::default()).await?;
/// # let model = runtime.load_with(ModelSource::demo(), LoadOptions::small(), |_| {}).await?;
/// let ids = model.tokenize("Hello!", false).await?;
/// assert_eq!(model.detokenize(ids).await?, "Hello!");
///
/// let picture = Image::from_bytes(bursar_model::demo::pictures()[1].bytes);
/// let prompt = model.prompt_of(Chat::new().user("What number is written?").image(picture)).await?;
/// assert!(prompt.token_ids.len() > prompt.picture_tokens[0]);
/// # runtime.shutdown().await;
/// # Ok(())
/// # }
/// ```
impl ModelHandle {
    /// The tokens of a text. Names of special tokens in it become those tokens, unlike in a chat. `add_special_tokens`
    /// also adds what the tokenizer puts around a text, such as a token for its beginning.
    ///
    /// # Errors
    /// [`ChatError::TooLong`] if it has more than 8,192 tokens above twice the context. [`ChatError::Text`];
    /// [`ChatError::NotStarted`] or [`ChatError::Stopped`].
    pub async fn tokenize(&self, text: impl Into<String>, add_special_tokens: bool) -> Result<Vec<u32>, ChatError> {
        let text = text.into();
        let encode = move |context: &ModelContext| {
            let limit = tokens_limit(context, usize::MAX);
            let tokens = context.prompts.tokenizer().encode_up_to(&text, add_special_tokens, counted_max(limit));
            counted(tokens, limit)
        };
        self.on_a_thread(encode).await
    }

    /// The text of these tokens, special ones included. Bytes that are not UTF-8 become U+FFFD. An id that only pads
    /// the vocabulary has no text.
    ///
    /// # Errors
    /// [`ChatError::Sampling`] of an id beyond the vocabulary, with its size; else as [`tokenize`](Self::tokenize).
    pub async fn detokenize(&self, token_ids: impl Into<Vec<u32>>) -> Result<String, ChatError> {
        let ids = token_ids.into();
        let decode = move |context: &ModelContext| {
            check_known(context, &ids, "tokens")?;
            Ok(context.prompts.tokenizer().decode(&ids, false)?)
        };
        self.on_a_thread(decode).await
    }

    /// Each token as the vocabulary spells it, as `convert_ids_to_tokens` of transformers does: byte-level tokens look
    /// odd, and those of an id that only pads the vocabulary are empty.
    ///
    /// # Errors
    /// As [`detokenize`](Self::detokenize).
    pub async fn token_strs(&self, token_ids: impl Into<Vec<u32>>) -> Result<Vec<String>, ChatError> {
        let ids = token_ids.into();
        let spell = move |context: &ModelContext| {
            check_known(context, &ids, "tokens")?;
            Ok(ids.iter().map(|id| context.prompts.tokenizer().token_of(*id).unwrap_or_default()).collect())
        };
        self.on_a_thread(spell).await
    }

    /// What this chat would be as a prompt, made as for a reply. Pictures and videos are planned by their headers;
    /// nothing is decoded or encoded. How the reply is to be generated is not looked at, nor is the deadline. A prompt may be
    /// longer than the context: compare it with [`context_tokens`](super::ModelFacts::context_tokens).
    ///
    /// # Errors
    /// [`ChatError::TooLong`] if the prompt exceeds twice the context by more than 8,192 tokens. The errors of
    /// [`chat`](Self::chat) about turns, tools, pictures, videos and the template.
    pub async fn prompt_of(&self, chat: Chat) -> Result<Prompt, ChatError> {
        self.on_a_thread(move |context| prompt_of(&chat, context)).await
    }

    /// Runs `work` on one of the threads for tokens, which goes on if the caller leaves.
    async fn on_a_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce(&ModelContext) -> Result<T, ChatError> + Send + 'static,
    ) -> Result<T, ChatError> {
        let context: Arc<ModelContext> = self.serving().await?.context;
        let permit = self.token_threads.clone().acquire_owned().await.expect("nobody closes it");
        let worked = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work(&context)
        });
        worked.await.map_err(|_| ChatError::PreparationDied)?
    }
}

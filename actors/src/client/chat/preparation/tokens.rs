//! Tokenization without generating: text to tokens and back, and the prompt of a chat.

use std::sync::Arc;

use bursar_model::error::SamplingError;

use super::prompt::{Prompt, counted, counted_max, prompt_of, tokens_limit};
use crate::{
    chat::{Chat, ChatError, ModelHandle},
    engine::ModelContext,
};

/// Tokenization without generating. These methods need no request credit and do not wait for the
/// device. At most four of them run per model at a time, and further callers wait in order.
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
    /// Tokenizes a text. Unlike in a chat, names of special tokens in the text become those tokens.
    /// `add_special_tokens` also adds the tokens that the tokenizer puts around a text, such as a
    /// token for its beginning.
    ///
    /// # Errors
    /// [`ChatError::TooLong`] if the text has more tokens than twice the context plus 8,192.
    /// [`ChatError::Text`]. [`ChatError::NotStarted`] or [`ChatError::Stopped`].
    pub async fn tokenize(&self, text: impl Into<String>, add_special_tokens: bool) -> Result<Vec<u32>, ChatError> {
        let text = text.into();
        let encode = move |context: &ModelContext| {
            let limit = tokens_limit(context, usize::MAX);
            let tokens = context.prompts.tokenizer().encode_up_to(&text, add_special_tokens, counted_max(limit));
            counted(tokens, limit)
        };
        self.on_a_thread(encode).await
    }

    /// Returns the text of these tokens, including special tokens. Bytes that are not UTF-8 become
    /// U+FFFD. An id that exists only as padding of the vocabulary has no text.
    ///
    /// # Errors
    /// [`ChatError::Sampling`], with the vocabulary's size, for an id outside the
    /// vocabulary. Otherwise see [`tokenize`](Self::tokenize).
    pub async fn detokenize(&self, token_ids: impl Into<Vec<u32>>) -> Result<String, ChatError> {
        let ids = token_ids.into();
        let decode = move |context: &ModelContext| {
            check_in_vocabulary(context, &ids)?;
            Ok(context.prompts.tokenizer().decode(&ids, false)?)
        };
        self.on_a_thread(decode).await
    }

    /// Returns each token as the vocabulary spells it, as `convert_ids_to_tokens` of transformers
    /// does. A byte-level vocabulary spells some bytes as other characters, such as U+0120 for a
    /// space. An id that exists only as padding of the vocabulary has an empty string.
    ///
    /// # Errors
    /// See [`detokenize`](Self::detokenize).
    pub async fn token_strs(&self, token_ids: impl Into<Vec<u32>>) -> Result<Vec<String>, ChatError> {
        let ids = token_ids.into();
        let spell = move |context: &ModelContext| {
            check_in_vocabulary(context, &ids)?;
            Ok(ids.iter().map(|id| context.prompts.tokenizer().token_of(*id).unwrap_or_default()).collect())
        };
        self.on_a_thread(spell).await
    }

    /// Returns the prompt of this chat, rendered as it would be for a reply. Pictures and
    /// videos are planned from their headers; nothing is decoded or encoded. Settings of the
    /// reply and deadlines are ignored. The prompt may be longer than the context; compare
    /// its length with [`context_tokens`](crate::chat::ModelFacts::context_tokens).
    ///
    /// # Errors
    /// [`ChatError::TooLong`] if the prompt has more tokens than twice the context plus 8,192.
    /// Otherwise the errors of [`chat`](Self::chat) that concern turns, tools, pictures,
    /// videos and the template.
    pub async fn prompt_of(&self, chat: Chat) -> Result<Prompt, ChatError> {
        self.on_a_thread(move |context| prompt_of(&chat, context)).await
    }

    /// Runs `work` on a blocking thread, as soon as one of the model's permits for such threads is
    /// free. The work continues even if the caller drops the future.
    async fn on_a_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce(&ModelContext) -> Result<T, ChatError> + Send + 'static,
    ) -> Result<T, ChatError> {
        let context: Arc<ModelContext> = self.serving().await?.context;
        let permit = self.token_threads.clone().acquire_owned().await.expect("the semaphore is never closed");
        let worked = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work(&context)
        });
        worked.await.map_err(|_| ChatError::PreparationDied)?
    }
}

/// Refuses ids that neither the tokenizer nor the model has. The tokenizer may have added tokens
/// past the model's last row of logits: the model cannot read or sample them, but
/// [`ModelHandle::tokenize`] may return them. Ids past the tokenizer's tokens that have a row of
/// logits are padding, and are accepted.
fn check_in_vocabulary(context: &ModelContext, ids: &[u32]) -> Result<(), ChatError> {
    let vocabulary = context.family.decoder().vocabulary.max(context.prompts.tokenizer().vocabulary_size());
    match ids.iter().find(|id| **id as usize >= vocabulary) {
        Some(&token) => Err(SamplingError::UnknownToken { parameter: "tokens", token, vocabulary }.into()),
        None => Ok(()),
    }
}

//! The loop of an actor that carries out the effects of its core.

use std::collections::VecDeque;

use ractor::{ActorProcessingErr, ActorRef, Message};

/// The state of an actor whose core turns each input into effects.
pub(crate) trait CarryOut: Send {
    type Message: Message;
    type Input: Send;
    type Effect: Send;

    /// Passes an input to the core.
    fn decide(&mut self, input: Self::Input) -> Vec<Self::Effect>;

    /// Carries out one effect. Returns the input that must be processed next, if the effect
    /// produces one. An effect that produces an input is the last effect of its step.
    fn carry_out(
        &mut self,
        myself: &ActorRef<Self::Message>,
        effect: Self::Effect,
    ) -> impl Future<Output = Result<Option<Self::Input>, ActorProcessingErr>> + Send;

    /// Processes an input, and then the inputs that follow from its effects, in order.
    fn step(
        &mut self,
        myself: &ActorRef<Self::Message>,
        input: Self::Input,
    ) -> impl Future<Output = Result<(), ActorProcessingErr>> + Send {
        async move {
            let mut inputs = VecDeque::from([input]);
            while let Some(input) = inputs.pop_front() {
                for effect in self.decide(input) {
                    inputs.extend(self.carry_out(myself, effect).await?);
                }
            }
            Ok(())
        }
    }
}

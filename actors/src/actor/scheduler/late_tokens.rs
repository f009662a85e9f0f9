//! Pure: the reason for which a token was late.

use crate::metric::Late;

/// The latest events that may have delayed tokens, on the caller's clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delays<T> {
    /// When the latest step with prompts ended.
    prompts: Option<T>,
    /// When the latest step ended during which pictures were being encoded.
    pictures: Option<T>,
    /// When the pool was last resized, or when a resize was last requested.
    pub(super) resized: Option<T>,
}

impl<T> Default for Delays<T> {
    fn default() -> Self {
        Delays { prompts: None, pictures: None, resized: None }
    }
}

impl<T: Copy + Ord> Delays<T> {
    /// Records a step that ended at `at`.
    pub(super) fn stepped(&mut self, at: T, has_prompts: bool, beside_pictures: bool) {
        if has_prompts {
            self.prompts = Some(at);
        }
        if beside_pictures {
            self.pictures = Some(at);
        }
    }

    /// The reason for which a token was late. The sequence's previous token was ready at `last`.
    /// Pictures take precedence over prompts: prompts are planned to keep the promise, and pictures
    /// change the conditions that a plan relied on.
    pub(super) fn reason(&self, last: T, was_preempted: bool) -> Late {
        let since = |at: Option<T>| at.is_some_and(|at| at > last);
        match () {
            () if was_preempted => Late::Preemption,
            () if since(self.resized) => Late::Resize,
            () if since(self.pictures) => Late::Picture,
            () if since(self.prompts) => Late::Prompt,
            () => Late::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_token_is_attributed_to_the_latest_events() {
        let mut delays = Delays::default();
        assert_eq!(delays.reason(0, false), Late::Other);
        delays.stepped(10, true, false);
        assert_eq!((delays.reason(0, false), delays.reason(10, false)), (Late::Prompt, Late::Other));
        delays.stepped(20, true, true);
        assert_eq!(delays.reason(10, false), Late::Picture);
        delays.resized = Some(15);
        assert_eq!((delays.reason(10, false), delays.reason(10, true)), (Late::Resize, Late::Preemption));
        assert_eq!(delays.reason(20, false), Late::Other, "the delays ended before the deadline");
    }
}

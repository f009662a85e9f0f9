//! Coordination of several samples of one prompt. The first sample computes the prompt. The other
//! samples wait, then use its KV blocks and pictures.

use tokio::sync::watch;

use super::RequestPictures;

/// How the first sample's computation of the prompt ended. The first sample passes this value to
/// the other samples.
#[derive(Clone)]
pub(crate) enum Lead {
    Computed {
        /// The generation of the actors that computed the prompt.
        generation: u64,
        pictures: RequestPictures,
    },
    /// Actors died too often while they served the first sample. The other samples
    /// would probably fail too.
    GivenUp,
}

/// The role of a sample among the samples of its prompt.
pub(crate) enum LeaderRole {
    /// The sample does not wait, and no other sample waits for it: the chat has a single sample, or
    /// the prompt has been computed or given up.
    Alone,
    /// Computes the prompt while the other samples wait.
    Leads(watch::Sender<Option<Lead>>),
    Follows(watch::Receiver<Option<Lead>>),
}

impl LeaderRole {
    /// Creates the roles of `samples` samples.
    pub(crate) fn of(samples: usize) -> Vec<LeaderRole> {
        if samples < 2 {
            return (0..samples).map(|_| LeaderRole::Alone).collect();
        }
        let (leads, follows) = watch::channel(None);
        let followers = (1..samples).map(|_| LeaderRole::Follows(follows.clone()));
        std::iter::once(LeaderRole::Leads(leads)).chain(followers).collect()
    }

    /// Returns `true` if other samples wait for the prompt.
    pub(crate) fn leads(&self) -> bool {
        matches!(self, LeaderRole::Leads(_))
    }

    /// Lets the waiting samples continue, because the prompt is computed or given up.
    pub(crate) fn announce(&mut self, lead: impl FnOnce() -> Lead) {
        if let LeaderRole::Leads(followers) = std::mem::replace(self, LeaderRole::Alone) {
            followers.send_replace(Some(lead()));
        }
    }

    /// Waits until the prompt is computed or given up. Returns `None` if this sample need not wait,
    /// or if the first sample has ended without an outcome.
    pub(crate) async fn wait(&mut self) -> Option<Lead> {
        let LeaderRole::Follows(leader) = self else { return None };
        let lead = leader.wait_for(Option::is_some).await.ok().and_then(|lead| lead.clone());
        // This drops the receiver. The channel keeps the shared pictures alive until every
        // sample has dropped its receiver.
        *self = LeaderRole::Alone;
        lead
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn followers_wait_for_the_leaders_announcement_unless_it_is_dropped() {
        let mut parts = LeaderRole::of(3);
        let mut second = parts.pop().expect("there are three roles");
        let mut third = parts.pop().expect("there are three roles");
        let mut first = parts.pop().expect("there are three roles");
        first.announce(|| Lead::Computed { generation: 7, pictures: RequestPictures::default() });
        first.announce(|| unreachable!("the leader announces only once"));
        assert!(matches!(second.wait().await, Some(Lead::Computed { generation: 7, .. })));
        assert!(matches!(third.wait().await, Some(Lead::Computed { generation: 7, .. })));
        assert!(second.wait().await.is_none(), "a second wait returns at once");

        let mut parts = LeaderRole::of(2);
        let mut second = parts.pop().expect("there are two roles");
        drop(parts);
        assert!(second.wait().await.is_none(), "the leader was dropped without an announcement");
        assert!(LeaderRole::of(1).pop().expect("there is one role").wait().await.is_none());
    }
}

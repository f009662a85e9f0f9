//! Pictures for embedders, read under a server's rules.

use std::fmt;

use super::{
    body::BodyPermit,
    error::ApiError,
    media::{self, Link, LoadedMedia},
    service::Service,
};
use crate::{Hint, Image};

/// Pictures that were read, in order. They count among the bytes that the [`Service`] holds until they are dropped.
pub struct ReadPictures {
    /// The pictures.
    pub pictures: Vec<Image>,
    _room: BodyPermit,
}

/// Why a picture was not read: a host or folder that is not allowed, a size, or something that is no picture.
#[derive(Clone, Debug)]
pub struct NotRead(ApiError);

impl NotRead {
    /// Whether the same may be read a moment later: there was no room, or no thread.
    pub fn is_busy(&self) -> bool {
        self.0.status.is_server_error()
    }
}

impl fmt::Display for NotRead {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.0.message())
    }
}

impl std::error::Error for NotRead {}

impl Hint for NotRead {
    type Text = String;

    fn hint(&self) -> String {
        self.0.hint_text().to_owned()
    }
}

impl Service {
    /// Reads pictures as it does those of its requests: `data:` URIs in base64, `http:` and `https:` URLs of
    /// [allowed hosts](super::ServeOptions::url_hosts), and `file:` URLs below the
    /// [media root](super::ServeOptions::media_root), within the same bounds on bytes and time. For fronts of other
    /// protocols. Nothing is decoded.
    ///
    /// # Errors
    /// [`NotRead`], of the first that could not be.
    pub async fn read_pictures(&self, urls: &[impl AsRef<str>]) -> Result<ReadPictures, NotRead> {
        let link = |(at, url): (usize, &_)| Link::picture(format!("pictures[{at}]"), AsRef::<str>::as_ref(url));
        let links: Result<Vec<_>, _> = urls.iter().enumerate().map(link).collect();
        let mut room = None;
        let seen = media::read(links.map_err(NotRead)?, None, self.shared(), &mut room).await.map_err(NotRead)?;
        let pictures = seen.into_iter().filter_map(|seen| match seen {
            LoadedMedia::Picture(picture) => Some(picture),
            LoadedMedia::Film(_) => None,
        });
        Ok(ReadPictures { pictures: pictures.collect(), _room: room })
    }
}

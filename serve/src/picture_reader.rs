//! Reading of pictures for programs that embed the server, with the same rules as for its requests.

use std::fmt;

use bursar::{Hint, Image};

use super::{
    body::BodyPermit,
    error::ApiError,
    media::{self, Link, LoadedMedia},
    state::Service,
};

/// Pictures that were read. They count toward the byte limit of the [`Service`]
/// until they are dropped.
pub struct ReadPictures {
    /// The pictures, in the order of their URLs.
    pub pictures: Vec<Image>,
    _permit: BodyPermit,
}

/// Why a picture was not read, for example because its host or folder is not allowed, or because
/// the picture is too large.
#[derive(Clone, Debug)]
pub struct PictureReadError(ApiError);

impl PictureReadError {
    /// Whether a retry may succeed, because the server only lacked memory, a download slot or a
    /// thread.
    pub fn is_busy(&self) -> bool {
        self.0.status.is_server_error()
    }
}

impl fmt::Display for PictureReadError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.0.message())
    }
}

impl std::error::Error for PictureReadError {}

impl Hint for PictureReadError {
    type Text = String;

    fn hint(&self) -> String {
        self.0.hint_text().to_owned()
    }
}

impl Service {
    /// Reads pictures as the server does for its requests: `data:` URIs in base64, `http:` and
    /// `https:` URLs of [allowed hosts](super::ServeOptions::url_hosts), and `file:` URLs below the
    /// [media root](super::ServeOptions::media_root), with the same limits on bytes and time.
    /// Intended for servers with other protocols. The pictures are not decoded.
    ///
    /// # Errors
    /// [`PictureReadError`] for the first picture that could not be read.
    pub async fn read_pictures(&self, urls: &[impl AsRef<str>]) -> Result<ReadPictures, PictureReadError> {
        let link = |(at, url): (usize, &_)| Link::picture(format!("pictures[{at}]"), AsRef::<str>::as_ref(url));
        let links: Result<Vec<_>, _> = urls.iter().enumerate().map(link).collect();
        let mut permit = None;
        let seen = media::read(links.map_err(PictureReadError)?, None, self.shared(), &mut permit)
            .await
            .map_err(PictureReadError)?;
        let pictures = seen.into_iter().filter_map(|seen| match seen {
            LoadedMedia::Picture(picture) => Some(picture),
            LoadedMedia::Video(_) => None,
        });
        Ok(ReadPictures { pictures: pictures.collect(), _permit: permit })
    }
}

//! Pictures and videos for a question, with the names under which they were given.

use std::path::{Path, PathBuf};

use bursar::{Chat, Image, ImageLimits, Video};

use super::options::{Options, picture};
use crate::failure::Failure;

#[derive(Clone, Default)]
pub struct Shown {
    images: Vec<(String, Image)>,
    videos: Vec<(String, Video)>,
}

impl Shown {
    /// Opens the pictures and videos that flags name.
    pub fn of(options: &Options, limits: &ImageLimits) -> Result<Self, Failure> {
        let mut shown = Shown::default();
        for path in &options.image {
            shown.open_image(path, options, limits)?;
        }
        let (folders, files): (Vec<_>, Vec<_>) = options.video.iter().partition(|path| path.is_dir());
        for folder in folders {
            shown.open_video(folder, options, limits)?;
        }
        if !files.is_empty() {
            shown.show_video("frames".to_owned(), options.frames(files.into_iter().map(PathBuf::as_path), limits)?);
        }
        Ok(shown)
    }

    /// Adds a question about all pictures and videos to `chat`.
    pub fn ask(&self, chat: Chat, question: &str) -> Chat {
        let images = self.images.iter().map(|(_, image)| image.clone());
        let videos = self.videos.iter().map(|(_, video)| video.clone());
        videos.fold(images.fold(chat.user(question), Chat::image), Chat::video)
    }

    /// Adds a picture, which must have a readable header and a size within the
    /// limits. Returns its description.
    pub fn open_image(&mut self, path: &Path, _: &Options, limits: &ImageLimits) -> Result<String, Failure> {
        let (image, (width, height)) = picture(path, limits)?;
        let name = path.display().to_string();
        let took = format!("{name}, {width} x {height} pixels");
        self.images.push((name, image));
        Ok(took)
    }

    /// Adds a folder of frames. Returns its description.
    pub fn open_video(&mut self, folder: &Path, options: &Options, limits: &ImageLimits) -> Result<String, Failure> {
        let name = folder.display().to_string();
        self.show_video(name.clone(), options.video(folder, limits)?);
        Ok(format!("the frames in {name}"))
    }

    pub fn show_video(&mut self, name: String, video: Video) {
        self.videos.push((name, video));
    }

    pub fn images(&self) -> usize {
        self.images.len()
    }

    pub fn videos(&self) -> usize {
        self.videos.len()
    }

    /// Returns all names, pictures first.
    pub fn names(&self) -> Vec<String> {
        let videos = self.videos.iter().map(|(name, _)| name.clone());
        self.images.iter().map(|(name, _)| name.clone()).chain(videos).collect()
    }

    /// Removes a picture. Returns its name, if there was one.
    pub fn drop_image(&mut self, index: usize) -> Option<String> {
        (index < self.images.len()).then(|| self.images.remove(index).0)
    }

    /// Removes a video. Returns its name, if there was one.
    pub fn drop_video(&mut self, index: usize) -> Option<String> {
        (index < self.videos.len()).then(|| self.videos.remove(index).0)
    }

    /// Removes the item with this name, or with this number, counted from 1, in
    /// [`names`](Self::names). Returns its name, if there was one.
    pub fn drop(&mut self, which: &str) -> Option<String> {
        let by_name = self.names().iter().position(|name| name == which);
        let index = by_name.or_else(|| which.parse::<usize>().ok()?.checked_sub(1))?;
        self.drop_image(index).or_else(|| self.drop_video(index.checked_sub(self.images.len())?))
    }
}

//! Files that outlive a process: complete or absent, with the permissions of the user's other
//! files, and cleaned up after a crash.

use std::{
    fs::{self, File, FileTimes},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use bursar_model::cache_file::{BYTES_MAX, CacheFile, CacheFileError, fingerprint};

/// A folder for one test, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn of(story: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cache-{}-{story}", std::process::id()));
        fs::create_dir_all(&folder).expect("a temporary folder");
        Folder(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_replaced_cache_file_has_new_content_and_default_permissions() {
    let folder = Folder::of("replaced");
    let file = CacheFile::named(&folder.0, &["demo"], &["demo"]);
    assert_eq!(file.read(), Ok(None));
    for content in [&b"first"[..], b"", b"third, which is longer"] {
        file.replace(content).expect("the file is written");
        assert_eq!(file.read().expect("the file is read").as_deref(), Some(content));
    }
    let beside = folder.0.join("beside");
    fs::write(&beside, "as the user's other files").expect("the file is written");
    let permissions = |path: &Path| fs::metadata(path).expect("the file exists").permissions();
    assert_eq!(permissions(&file.path()), permissions(&beside));
}

#[test]
fn content_that_could_not_be_read_again_is_not_written() {
    let folder = Folder::of("too-large");
    let file = CacheFile::named(&folder.0, &["demo"], &["demo"]);
    let largest = vec![b' '; BYTES_MAX as usize];
    file.replace(&largest).expect("the largest content is written");
    assert_eq!(file.replace(&[&largest[..], b" "].concat()), Err(CacheFileError::TooLarge { bytes: BYTES_MAX + 1 }));
    assert_eq!(file.read(), Ok(Some(largest)), "the old content is unchanged");
    assert_eq!(fs::read_dir(&folder.0).expect("the folder exists").count(), 1, "no temporary file is left");
}

#[test]
fn only_stale_temporary_cache_files_are_removed() {
    let folder = Folder::of("leavings");
    let file = CacheFile::named(&folder.0, &["demo"], &["demo"]);
    let name = file.path().file_name().expect("a name").to_string_lossy().into_owned();
    let aside = |name: &str, hours: u64| {
        let path = folder.0.join(name);
        let made = File::create(&path).expect("the file is created");
        let written = SystemTime::now() - Duration::from_secs(hours * 3600);
        made.set_times(FileTimes::new().set_modified(written)).expect("the modification time is set");
        path
    };
    let left = aside(&format!(".{name}.12-0.new"), 2);
    let being_written = aside(&format!(".{name}.13-0.new"), 0);
    let of_another = aside(".other.json.12-0.new", 2);
    // This process's first temporary file name is taken, as by a process with the same
    // PID in a container.
    let taken = aside(&format!(".{name}.{}-0.new", std::process::id()), 0);
    file.replace(b"new").expect("the file is written");
    assert_eq!(file.read(), Ok(Some(b"new".to_vec())));
    assert!(!left.exists(), "a temporary file two hours old is removed");
    assert!(being_written.exists() && of_another.exists() && taken.exists());
}

#[test]
fn fingerprints_depend_on_the_boundaries_between_parts() {
    assert_ne!(fingerprint(&["ab", "c"]), fingerprint(&["a", "bc"]));
    assert_ne!(fingerprint(&["ab"]), fingerprint(&["ab", ""]));
    assert_eq!(fingerprint(&["ab", "c"]), fingerprint(&["ab", "c"]));
    let long = "x".repeat(10_000);
    let file = CacheFile::named("folder", &[&long, &long], &[&long]);
    assert!(file.path().file_name().expect("a name").len() < 255, "the name is short enough for every file system");
}

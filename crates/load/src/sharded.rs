//! A model in several safetensors files, named by an index.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use crate::error::LoadError;
use crate::{FileSource, SafetensorsFile, Tensor};

/// A larger index is a mistake or an attack: the largest models have indices of a few MB.
const MAX_INDEX_BYTES: usize = 100_000_000;

/// The files of a sharded model, open and validated.
///
/// The index is the JSON file that model hubs publish beside the shards
/// (`model.safetensors.index.json`): its `weight_map` names the file of each tensor.
///
/// ```no_run
/// use memferry::load::ShardedFiles;
///
/// let model = ShardedFiles::open("model/model.safetensors.index.json")?;
/// println!("{} files", model.files().len());
/// # Ok::<_, memferry::load::LoadError>(())
/// ```
#[derive(Debug)]
pub struct ShardedFiles {
    files: Vec<SafetensorsFile>,
    /// The index of the file, and the tensor's in it.
    wanted: Vec<(usize, usize)>,
}

impl ShardedFiles {
    /// Opens all files that an index names, and finds each of its tensors.
    pub fn open(index: impl AsRef<Path>) -> Result<Self, LoadError> {
        let index = index.as_ref();
        let invalid = |reason: String| LoadError::InvalidIndex { path: index.to_owned(), reason };
        let file = FileSource::open(index)?;
        let bytes = usize::try_from(file.len()).unwrap_or(usize::MAX);
        if bytes > MAX_INDEX_BYTES {
            return Err(invalid(format!(
                "it has {bytes} bytes, and an index at most {MAX_INDEX_BYTES}: is it a file of tensors?"
            )));
        }
        let mut text = vec![0; bytes];
        file.read_exact(0, &mut text)?;
        let parsed: serde_json::Value =
            serde_json::from_slice(&text).map_err(|error| invalid(error.to_string()))?;
        let map = parsed.get("weight_map").and_then(|map| map.as_object());
        let map = map.ok_or_else(|| invalid("it has no object `weight_map`".into()))?;

        let mut by_file: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, file) in map {
            let file = file
                .as_str()
                .ok_or_else(|| invalid(format!("the file of {tensor} is not a text")))?;
            // An index is untrusted: it may name files beside itself, and no others.
            if Path::new(file).file_name() != Some(file.as_ref()) {
                return Err(invalid(format!("{file} is not the name of a file beside the index")));
            }
            by_file.entry(file).or_default().push(tensor);
        }

        let folder = index.parent().unwrap_or(Path::new(""));
        let (mut files, mut wanted) = (Vec::new(), Vec::new());
        for (number, (name, tensors)) in by_file.into_iter().enumerate() {
            let file = SafetensorsFile::open(folder.join(name))?;
            let places: HashMap<&str, usize> =
                file.tensors().iter().enumerate().map(|(at, t)| (t.name.as_str(), at)).collect();
            for tensor in tensors {
                let at = places
                    .get(tensor)
                    .ok_or_else(|| invalid(format!("{name} has no tensor {tensor}")))?;
                wanted.push((number, *at));
            }
            files.push(file);
        }
        wanted.sort_unstable();
        Ok(Self { files, wanted })
    }

    /// The files, in the order of their names.
    pub fn files(&self) -> &[SafetensorsFile] {
        &self.files
    }

    /// The tensors of the index, each with the number of its file, in the order of the files.
    pub fn tensors(&self) -> impl Iterator<Item = (usize, &Tensor)> {
        self.wanted.iter().map(|&(file, at)| (file, &self.files[file].tensors()[at]))
    }

    /// Gives the files away, to load placements from them.
    pub fn into_sources(self) -> Vec<FileSource> {
        self.files.into_iter().map(SafetensorsFile::into_source).collect()
    }
}

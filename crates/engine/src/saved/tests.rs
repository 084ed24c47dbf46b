use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// How often anybody measured.
static MEASURED: AtomicU32 = AtomicU32::new(0);

#[derive(Debug, PartialEq)]
struct Height {
    origin: Origin,
    metres: f64,
}

impl Saved for Height {
    const FIRST_WORD: &'static str = "height";

    fn path(named: &Path, _: bool) -> PathBuf {
        named.with_extension("height")
    }

    fn cores() -> usize {
        3
    }

    fn built_in() -> Self {
        Self { origin: Origin::BuiltIn, metres: 1.0 }
    }

    fn measure() -> Option<Self> {
        MEASURED.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(20));
        Some(Self { origin: Origin::Measured, metres: 2.5 })
    }

    fn found(self, origin: Origin) -> Self {
        Self { origin, ..self }
    }

    fn to_entries(&self) -> String {
        format!("metres {}\n", self.metres)
    }

    fn from_entries(entries: &Entries<'_>) -> Result<Self, String> {
        Ok(Self { origin: Origin::BuiltIn, metres: entries.number("metres")? })
    }
}

#[test]
fn values_are_read_back_as_they_were() {
    let height = Height { origin: Origin::BuiltIn, metres: 8.25 };
    assert_eq!(from_text(&to_text(&height)), Ok(Some(height)));
}

#[test]
fn a_file_of_another_machine_counts_for_nothing_and_other_text_is_an_error() {
    assert_eq!(from_text::<Height>("height 0.0.0 99 some other processor\n"), Ok(None));
    assert!(from_text::<Height>("heights 1 2 3\n").is_err());
    let good = to_text(&Height::built_in());
    for value in ["-3", "soon", "inf", "NaN"] {
        let broken = good.replace("metres 1", &format!("metres {value}"));
        assert!(from_text::<Height>(&broken).is_err(), "{value}");
    }
}

#[test]
fn of_many_that_start_together_one_measures_for_all() {
    let folder = tempfile::tempdir().unwrap();
    let source = ProfileSource::File(folder.path().join("deep").join("named"));
    let heights: Vec<Height> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| load(&source).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(MEASURED.load(Ordering::Relaxed), 1);
    assert!(heights.iter().all(|height| height.metres == 2.5));
    let file = folder.path().join("deep").join("named.height");
    assert_eq!(heights.iter().filter(|height| height.origin == Origin::Measured).count(), 1);
    assert_eq!(load::<Height>(&source).unwrap().origin, Origin::Saved(file.clone()));
    let left: Vec<_> = fs::read_dir(file.parent().unwrap()).unwrap().collect();
    assert_eq!(left.len(), 1, "nothing is left behind but the file");
}

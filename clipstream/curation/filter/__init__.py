"""`clipstream filter`: the samples that hold conditions in SQL, recipes of DataComp, and MetaCLIP's balance."""
